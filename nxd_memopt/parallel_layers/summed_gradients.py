"""Marks summed sequence-parallel gradients, so that each is summed over the tensor-parallel ranks once a step.

A script may sum gradients with ``reduce_from_tensor_model_parallel_region(param.grad.data)`` and then step an
optimizer that sums them too. The mark is an attribute of the gradient: its ``_version`` when it was summed. Every
write that autograd sees increments ``_version``, so a gradient with a mark of its present version is a sum. If a
backward pass follows a write (``zero_()``), the gradient is this rank's part again and loses its mark. A write
without a later backward pass may be zeroing or scaling: then asking is an error, unless all values are 0.

``param.grad.data`` has another ``_version``, but the same storage. So the storage has an attribute too: weak references
to the parameters with a gradient in it, or the note that a tensor was summed which is none of their gradients.

Not seen are writes that increment no ``_version`` (``param.grad.data.zero_()``, a CUDA graph of the script's own) and
sums by other functions (``torch.distributed.all_reduce``), unless the script says so: see ``grads``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.data_shards import local_gradient, local_rows

# Attributes with plain values, which torch.save can write.
_VERSION = "sequence_sum_version"  # of a gradient: its ``_version`` when it was summed
_UPDATES = "sequence_sum_updates"  # of a parameter: its own ``_version`` when its gradient was summed
# Attributes of a storage.
_PARAMS = "sequence_parallel_params"
_HAS_OTHER_SUM = "has_unknown_sequence_sum"


def gradient_of(param: Tensor) -> Tensor | None:
    """Return the gradient for the optimizer: ``main_grad`` if gradients accumulate in fp32.

    Of a parameter that is sharded over data-parallel ranks, return the rows of this rank.
    """
    main_grad = getattr(param, "main_grad", None)
    return local_gradient(param) if main_grad is None else main_grad


def is_sequence_parallel(param: Tensor) -> bool:
    """Return whether ``param`` is tagged: its gradient is a partial sum over sequence shards."""
    return bool(getattr(param, "sequence_parallel_enabled", False))


def is_sum(grad: Tensor) -> bool:
    """Return whether ``grad`` is marked as a sum and was not written to since."""
    return getattr(grad, _VERSION, None) == grad._version


def was_summed(grad: Tensor) -> bool:
    """Return whether ``grad`` is marked as a sum, which may have been written to since."""
    return hasattr(grad, _VERSION)


@contextmanager
def keep_sums(grads: Iterable[Tensor]) -> Iterator[None]:
    """Keep the marks of ``grads``; writes in the block must be linear (scale, average)."""
    summed = [grad for grad in grads if is_sum(grad)]
    yield
    # After all writes: gradients that are views of one tensor share its version.
    for grad in summed:
        setattr(grad, _VERSION, grad._version)


def observe(params: Iterable[Tensor]) -> None:
    """See the backward passes of tagged parameters from now on; parameters may be tagged after the first call."""
    for param in params:
        if not (is_sequence_parallel(param) and param.requires_grad):
            continue
        if note_accumulation in (param._post_accumulate_grad_hooks or {}).values():
            continue
        # A hook that held its parameter would be a cycle through autograd, which is never garbage-collected.
        param.register_hook(functools.partial(_before_accumulation, weakref.ref(param)))
        param.register_post_accumulate_grad_hook(note_accumulation)
        grad = gradient_of(param)
        if grad is not None:
            _refer(param, grad)


def _before_accumulation(known: weakref.ref[Tensor], incoming: Tensor) -> None:
    """Hook on the incoming gradient, also in ``torch.autograd.grad``; not run by FSDP2 and replays of CUDA graphs."""
    param = known()
    if param is None:
        return
    grad = gradient_of(param)
    if grad is None:
        vars(param).pop(_UPDATES, None)
    elif _was_replaced(param, grad):
        raise ValueError(_message(param, _MIXTURE))
    # A script's autograd function has summed what it returned. Added to a gradient, this would be seen no more.
    if getattr(incoming.untyped_storage(), _HAS_OTHER_SUM, False):
        raise ValueError(_message(param, _UNKNOWN))


def note_accumulation(param: Tensor) -> None:
    """Hook on the accumulated gradient: it is this rank's part. The last write was the accumulation.

    Raises:
        ValueError: the part was added to a sum.
    """
    grad = gradient_of(param)
    if grad is None:
        return
    _refer(param, grad)
    version = getattr(grad, _VERSION, None)
    if version == grad._version:
        return  # a script's hook ran before this one, and has summed
    # backward(create_graph=True), which alone enables gradients here, adds into a new tensor.
    if version == grad._version - 1 or (torch.is_grad_enabled() and _was_replaced(param, grad)):
        raise ValueError(_message(param, _MIXTURE))
    forget_sum(param, grad)


def needs_sum(param: Tensor, grad: Tensor | None = None) -> bool:
    """Return whether the gradient of ``param``, a tagged parameter, is still this rank's part.

    Args:
        param: the parameter.
        grad: its gradient; default ``gradient_of(param)``.

    Raises:
        ValueError: it is unknown whether the gradient is a sum.
    """
    observe([param])
    if grad is None:
        grad = gradient_of(param)
    assert grad is not None
    if is_sum(grad):
        return False
    if not was_summed(grad):
        if getattr(grad.untyped_storage(), _HAS_OTHER_SUM, False):
            raise ValueError(_message(param, _UNKNOWN))
        if _was_replaced(param, grad):
            raise ValueError(_message(param, _WRITTEN))
        return True
    # Zeros are fine; only this case waits for the device. torch_xla may return wrong values if pending results are
    # read one by one.
    backend.mark_step()
    if grad.detach().any():
        raise ValueError(_message(param, _WRITTEN))
    return True


def mark_summed(params: Iterable[Tensor]) -> None:
    """Mark the gradients of tagged parameters as sums over the sequence shards."""
    params = list(params)
    observe(params)
    for param in params:
        grad = gradient_of(param)
        if grad is not None:
            _mark(param, grad)


def _mark(param: Tensor, grad: Tensor) -> None:
    _refer(param, grad)
    setattr(grad, _VERSION, grad._version)
    setattr(param, _UPDATES, local_rows(param)._version)


def forget_sum(param: Tensor, grad: Tensor) -> None:
    """Make ``grad`` this rank's part again, after a write that autograd does not see."""
    vars(grad).pop(_VERSION, None)
    vars(param).pop(_UPDATES, None)


def move_sum(source: Tensor, target: Tensor) -> None:
    """Give ``target``, a copy of ``source``, the mark of ``source``."""
    vars(target).pop(_VERSION, None)
    if was_summed(source):
        # The copy of a sum that was written to is unknown too: no tensor has version -1.
        setattr(target, _VERSION, target._version if is_sum(source) else -1)


def _was_replaced(param: Tensor, grad: Tensor) -> bool:
    """Return whether ``grad`` without a mark replaces one that was summed since the last update.

    ``param.grad = param.grad / 2`` makes a tensor without a mark. A gradient that a script assigns in the next step
    differs: the update in between increments the parameter's version.
    """
    return not was_summed(grad) and getattr(param, _UPDATES, None) == local_rows(param)._version


# Sums by a script


@contextmanager
def marking_sum(tensor: Tensor, *, over_tensor_ranks: bool) -> Iterator[None]:
    """Mark the gradient that shares memory with ``tensor``, which the block replaces by its sum over ranks.

    Args:
        tensor: a gradient, an alias of one, or another tensor.
        over_tensor_ranks: the sum is over the ranks that share a sequence. Sums over other ranks (data, context)
            are linear and keep all marks.

    Raises:
        ValueError: the gradient is a sum already, would be summed in part, or is still to be accumulated.
    """
    storage = tensor.untyped_storage()
    if over_tensor_ranks:
        _require_accumulated(storage)
    gradients = list(_gradients_in(storage))
    inside: list[tuple[Tensor, Tensor]] = []
    if over_tensor_ranks:
        inside = [(param, grad) for param, grad in gradients if _is_same_memory(param, grad, tensor)]
    for param, grad in inside:
        if not needs_sum(param, grad):
            raise ValueError(_message(param, _TWICE))
    with keep_sums([grad for _, grad in gradients]):
        yield
    for param, grad in inside:
        _mark(param, grad)
    if over_tensor_ranks and not inside:
        setattr(storage, _HAS_OTHER_SUM, True)


def _require_accumulated(storage: torch.UntypedStorage) -> None:
    """Refuse a sum of a tensor that backward is about to add to the gradient of a tagged parameter."""
    # In hooks of a parameter the current node is its AccumulateGrad.
    node: Any = torch._C._current_autograd_node()
    param = getattr(node, "variable", None)
    if param is None or not is_sequence_parallel(param):
        return
    if not any(storage is grad.untyped_storage() for grad in _gradients(param)):
        raise ValueError(_message(param, _UNKNOWN))
    # The hook that sums may have been registered, and so runs, before the library's.
    note_accumulation(param)


def _gradients(param: Tensor) -> list[Tensor]:
    # Both: with main_grad a hook may sum the gradient before it is added.
    both = (local_gradient(param), getattr(param, "main_grad", None))
    return [grad for grad in both if grad is not None]


def _gradients_in(storage: torch.UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the observed parameters with a gradient in ``storage``, each with this gradient."""
    for reference in getattr(storage, _PARAMS, ()):
        param = reference()
        if param is None:
            continue
        for grad in _gradients(param):
            if grad.untyped_storage() is storage:
                yield param, grad


def _refer(param: Tensor, grad: Tensor) -> None:
    """Note in the storage of ``grad`` that it has a gradient of ``param``."""
    storage = grad.untyped_storage()
    references = getattr(storage, _PARAMS, ())
    if all(reference() is not param for reference in references):
        setattr(storage, _PARAMS, (*references, weakref.ref(param)))


def _is_same_memory(param: Tensor, grad: Tensor, tensor: Tensor) -> bool:
    """Return whether ``tensor`` has the elements of ``grad``, in the same storage, or none of them."""
    if _span(tensor) == _span(grad) and tensor.numel() == grad.numel():
        return True
    start, stop = _span(tensor)
    first, last = _span(grad)
    if start < last and first < stop:
        raise ValueError(_message(param, _PARTIAL))
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's range in its storage: first element, and one after the last."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + sum((size - 1) * stride for size, stride in strides) + 1


_REMEDY = "sum it once, after the last backward pass of a step, and clear it by zero_grad() before the next"
_TWICE = f"was summed over the tensor-parallel ranks already, and would be summed twice: {_REMEDY}"
_MIXTURE = (
    "was summed over the tensor-parallel ranks, and a later backward pass adds this rank's part to the sum, which no "
    f"further sum makes right: {_REMEDY} (zeroing through .data is not seen)"
)
_WRITTEN = (
    "was summed over the tensor-parallel ranks and written to since, or another tensor was assigned to .grad, and it "
    "is not known whether it is still a sum: change it before the sum or by grads.clip_grad_norm, or call "
    "grads.mark_sequence_parallel_gradients_summed if it is one"
)
_PARTIAL = "shares memory with a tensor of other elements, which would be summed: pass the gradient itself, all of it"
_UNKNOWN = (
    "has memory that reduce_from_tensor_model_parallel_region has summed before it was known as the gradient, and what "
    f"is added later is not known: {_REMEDY}, in no hook on an incoming gradient, and build the optimizer before the "
    "first backward pass"
)


def _message(param: Tensor, what: str) -> str:
    return f"the sequence-parallel gradient of a parameter of shape {list(param.shape)} {what}"
