"""Records which sequence-parallel gradients were summed, so that none is summed twice or left unsummed.

A script may sum gradients itself, through ``mappings.reduce_from_tensor_model_parallel_region(param.grad.data)``, and
step an optimizer that sums them too. ``param.grad.data`` is another tensor object than ``param.grad``, with another
version counter, but it has the same storage. The record is therefore made on ``param.grad`` itself, which is found by
its storage among the parameters that the library has seen.

The record is ``grad._version`` at the time of the sum, as every write that autograd sees raises it. A write after the
sum is understood when a backward pass follows it (the gradient was zeroed, then computed again). Otherwise the gradient
might be a sum, a part, or a mixture, and asking for it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_RECORD = "sequence_sum_record"  # attribute of a gradient; plain values, so that it can be saved with the tensor
_PRUNE_ABOVE = 256  # storages; a training step sums far fewer tensors that are no gradient of a known parameter


class _Record(NamedTuple):
    """The gradient's ``_version`` when it was summed; ``is_mixed``: a backward pass has since added a part to it."""

    version: int
    is_mixed: bool = False


def gradient_of(param: Tensor) -> Tensor | None:
    """The gradient that the optimizer will use: ``main_grad`` where gradients accumulate in fp32."""
    main_grad = getattr(param, "main_grad", None)
    return param.grad if main_grad is None else main_grad


def is_sequence_parallel(param: Tensor) -> bool:
    """Whether ``param`` is tagged: its gradient is the part of this rank's sequence shard."""
    return bool(getattr(param, "sequence_parallel_enabled", False))


def _record_of(grad: Tensor) -> _Record | None:
    values = getattr(grad, _RECORD, None)
    return None if values is None else _Record(*values)


def _write_record(grad: Tensor, version: int, *, is_mixed: bool = False) -> None:
    setattr(grad, _RECORD, (version, is_mixed))


def forget_sum(grad: Tensor) -> None:
    """Treat ``grad`` as this rank's part again: it was overwritten by a write that autograd does not count."""
    if _record_of(grad) is not None:
        delattr(grad, _RECORD)


def move_sum(source: Tensor, target: Tensor) -> None:
    """Let ``target``, to which ``source`` was copied, be summed if and only if ``source`` is."""
    forget_sum(target)
    record = _record_of(source)
    if record is not None:
        writes = source._version - record.version
        _write_record(target, target._version - writes, is_mixed=record.is_mixed)


@contextmanager
def keep_sums(grads: Iterable[Tensor]) -> Iterator[None]:
    """Let writes inside, which must be linear (scale, average), leave summed gradients summed."""
    writes = [(grad, record, grad._version - record.version) for grad in grads if (record := _record_of(grad))]
    yield
    # after all of the writes: gradients that are views of one tensor share its version counter
    for grad, record, count in writes:
        _write_record(grad, grad._version - count, is_mixed=record.is_mixed)


def note_accumulation(param: Tensor) -> None:
    """Note that backward has just added to ``gradient_of(param)``, as one in-place write."""
    grad = gradient_of(param)
    record = None if grad is None else _record_of(grad)
    if grad is None or record is None:
        return
    if grad._version == record.version + 1:
        # the only write since the sum: parts were added to a sum, and no later sum can be right
        _write_record(grad, grad._version, is_mixed=True)
    else:
        forget_sum(grad)  # zeroed in between


def _after_accumulation(param: Tensor) -> None:
    # where gradients accumulate in main_grad, its own hook notes the accumulation when it has added to it
    if getattr(param, "main_grad", None) is None:
        note_accumulation(param)


def _is_part_of(inner: Tensor, outer: Tensor) -> bool | None:
    """Whether ``inner``, of the same storage, lies within ``outer``; ``None`` if they share some elements only."""
    (start, end), (outer_start, outer_end) = _span(inner), _span(outer)
    if outer_start <= start and end <= outer_end and outer.numel() == outer_end - outer_start:
        return True
    return False if end <= outer_start or outer_end <= start else None


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first element in the storage, and the one after the last."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1


@dataclass
class GradientLedger:
    """The parameters that the library has seen, and the storages of sums that belong to none of them.

    Args:
        functional_mappings: mappings write to no input, also outside autograd: a region that runs twice must not.
    """

    functional_mappings: bool = False
    _params: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)  # by id: tensors compare by element
    # A StorageWeakRef keeps the address of its storage from being used again, so that a key means one storage.
    _unknown_sums: dict[int, StorageWeakRef] = field(default_factory=dict)
    _prune_above: int = _PRUNE_ABOVE

    def track(self, params: Iterable[Tensor]) -> None:
        """Recognize sums of these parameters' gradients from now on; parameters are not kept alive."""
        for param in params:
            if not self._is_tracked(param):
                self._params[id(param)] = weakref.ref(param)
            self._observe(param)

    def _is_tracked(self, param: Tensor) -> bool:
        known = self._params.get(id(param))
        return known is not None and known() is param

    @staticmethod
    def _observe(param: Tensor) -> None:
        """Hook on backward's accumulation; a parameter may be tagged after it was first seen."""
        if is_sequence_parallel(param) and param.requires_grad:
            hooks = param._post_accumulate_grad_hooks or {}
            if _after_accumulation not in hooks.values():
                param.register_post_accumulate_grad_hook(_after_accumulation)

    def needs_sum(self, param: Tensor) -> bool:
        """Whether the gradient of ``param`` is still this rank's part; it must have one.

        Raises:
            ValueError: it cannot be told, or no sum can be right any more.
        """
        grad = gradient_of(param)
        assert grad is not None
        was_tracked = self._is_tracked(param)
        self.track([param])
        record = _record_of(grad)
        if record is None:
            if not was_tracked and self._is_unknown_sum(grad):
                raise ValueError(_message(param, _SEEN_TOO_LATE))
            return True
        if record.is_mixed:
            raise ValueError(_message(param, _MIXED))
        if record.version == grad._version:
            return False
        # Written to, and no backward pass since. Zeros are a sum and a part; this branch alone waits for the device.
        if not grad.detach().any():
            return True
        raise ValueError(_message(param, _WRITTEN))

    def mark_summed(self, params: Iterable[Tensor]) -> None:
        """Record that the gradients of these parameters are sums over the sequence shards."""
        params = list(params)
        self.track(params)
        for param in params:
            grad = gradient_of(param)
            if grad is not None:
                _write_record(grad, grad._version)

    @contextmanager
    def writing_sum(self, tensor: Tensor, *, over_tensor_ranks: bool) -> Iterator[None]:
        """Record the gradients that an in-place sum of ``tensor``, done inside, is the sum of.

        Args:
            tensor: a gradient, an alias of one, a flat tensor that holds several, or something else.
            over_tensor_ranks: the ranks of the sum are those that share a sequence.

        Raises:
            ValueError: a gradient was summed already, or only a part of it is to be.
        """
        inside = self._gradients_in(tensor) if over_tensor_ranks else []
        for param, is_inside in inside:
            if is_inside is None:
                raise ValueError(_message(param, _PARTIAL))
            if is_inside and not self.needs_sum(param):
                raise ValueError(_message(param, _TWICE))
        with keep_sums([grad for _, grad in self._sharing(tensor)]):
            yield
        summed = [param for param, is_inside in inside if is_inside]
        self.mark_summed(summed)
        if over_tensor_ranks and not summed:
            self._note_unknown(tensor)

    def _gradients_in(self, tensor: Tensor) -> Sequence[tuple[Tensor, bool | None]]:
        parts = ((param, _is_part_of(grad, tensor)) for param, grad in self._sharing(tensor))
        return [(param, part) for param, part in parts if part is not False]

    def _sharing(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Tagged parameters and their gradients, of those in the storage of ``tensor``."""
        if tensor.is_inference() or not tensor.is_floating_point():
            return []
        storage = tensor.untyped_storage()._cdata
        found: list[tuple[Tensor, Tensor]] = []
        for key, known in list(self._params.items()):
            param = known()
            if param is None:
                del self._params[key]
                continue
            grad = gradient_of(param) if is_sequence_parallel(param) else None
            if grad is not None and grad.untyped_storage()._cdata == storage:
                found.append((param, grad))
        return found

    def _note_unknown(self, tensor: Tensor) -> None:
        if tensor.is_inference() or not tensor.is_floating_point():
            return
        storage = StorageWeakRef(tensor.untyped_storage())
        self._unknown_sums.setdefault(storage.cdata, storage)
        if len(self._unknown_sums) > self._prune_above:
            self._unknown_sums = {key: ref for key, ref in self._unknown_sums.items() if not ref.expired()}
            self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._unknown_sums))

    def _is_unknown_sum(self, grad: Tensor) -> bool:
        return grad.untyped_storage()._cdata in self._unknown_sums


_REMEDY = "sum it once, after the last backward pass of a step, and clear it by zero_grad() before the next"
_TWICE = f"was summed over the tensor-parallel ranks already, and would be summed twice: {_REMEDY}"
_MIXED = (
    "was summed over the tensor-parallel ranks, and a later backward pass added this rank's part to the sum, which no "
    f"further sum makes right: {_REMEDY} (zeroing through .data is not seen)"
)
_WRITTEN = (
    "was summed over the tensor-parallel ranks and written to since, and whether it is still a sum is not known: scale "
    "it before the sum or by grads.clip_grad_norm, or call grads.mark_sequence_parallel_gradients_summed if it is one"
)
_PARTIAL = "would be summed in part: pass all of it to reduce_from_tensor_model_parallel_region"
_SEEN_TOO_LATE = (
    "was summed by reduce_from_tensor_model_parallel_region before the library knew its parameter, and what was added "
    "since is not known: sum it once, or build the optimizer before the first backward pass"
)


def _message(param: Tensor, what: str) -> str:
    return f"the sequence-parallel gradient of a parameter of shape {list(param.shape)} {what}"
