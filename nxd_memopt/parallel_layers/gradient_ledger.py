"""Records which sequence-parallel gradients were summed, so that none is summed twice or left unsummed.

A script may sum gradients itself, through ``mappings.reduce_from_tensor_model_parallel_region(param.grad.data)``, and
step an optimizer that sums them too. ``param.grad.data`` is another tensor object than ``param.grad``, with another
version counter, but it has the same storage. The record is therefore made on ``param.grad`` itself, which is found by
its storage among the parameters that the library has seen.

The record says what the gradient is: this rank's part, the sum, or a mixture of both; and it has ``grad._version`` of
that moment, as every write that autograd sees raises it. A write after the sum is understood when a backward pass
follows it (the gradient was zeroed, then computed again). Otherwise the gradient might be a sum, a part, or a mixture,
and asking for it is an error.

Two hooks on each parameter follow a backward pass: one sees the incoming gradient, which a script's own hook or
autograd Function may have summed before it is added; the other one sees the gradient that it was added to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nxd_memopt.backends import backend

_RECORD = "sequence_sum_record"  # attribute of a gradient; plain values, so that it can be saved with the tensor
_SUMMED_AT = "sequence_sum_at"  # attribute of a parameter: its own _version when its gradient was summed
_ARRIVAL = "sequence_sum_arrival"  # attribute of a parameter, from one hook of a backward pass to the other
_PRUNE_ABOVE = 256  # storages; a training step sums far fewer tensors that are no gradient of a known parameter

# What a gradient is. _CLEARED: a sum or a mixture that was written to since, which backward takes to be zeros.
_PART, _SUM, _MIXED, _CLEARED = "part", "sum", "mixed", "cleared"


class _Record(NamedTuple):
    """The gradient's ``_version`` when it was recorded, and what it was."""

    version: int
    state: str


class _Arrival(NamedTuple):
    """An incoming gradient: what it is added to (``None``: nothing), what it is, and the address of its storage."""

    before: str | None
    state: str
    storage: int


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


def _write_record(grad: Tensor, version: int, state: str) -> None:
    setattr(grad, _RECORD, (version, state))


def forget_sum(param: Tensor, grad: Tensor) -> None:
    """Treat ``grad`` as this rank's part again: it was overwritten by a write that autograd does not count."""
    for tensor, name in ((grad, _RECORD), (param, _SUMMED_AT)):
        if hasattr(tensor, name):
            delattr(tensor, name)


def move_sum(source: Tensor, target: Tensor) -> None:
    """Let ``target``, to which ``source`` was copied, be summed if and only if ``source`` is."""
    record = _record_of(source)
    if record is None:
        _write_record(target, target._version, _PART)
    else:
        _write_record(target, target._version - (source._version - record.version), record.state)


@contextmanager
def keep_sums(grads: Iterable[Tensor]) -> Iterator[None]:
    """Let writes inside, which must be linear (scale, average), leave summed gradients summed."""
    writes = [(grad, record, grad._version - record.version) for grad in grads if (record := _record_of(grad))]
    yield
    # after all of the writes: gradients that are views of one tensor share its version counter
    for grad, record, count in writes:
        _write_record(grad, grad._version - count, record.state)


def _was_replaced(param: Tensor) -> bool:
    """Whether ``param.grad``, which has no record, stands for one that was summed after the last update of ``param``.

    ``param.grad = param.grad / 2`` makes a tensor without a record. A gradient that a script computes and assigns in
    the next step is told apart by the update in between, which raises the version of the parameter.
    """
    return getattr(param, _SUMMED_AT, None) == param._version


def _state_of(param: Tensor, grad: Tensor, *, writes: int = 0) -> str:
    """What the gradient is, apart from the last ``writes`` writes to it."""
    record = _record_of(grad)
    if record is None:
        return _MIXED if _was_replaced(param) else _PART
    if record.state == _PART or record.version + writes == grad._version:
        return record.state
    return _CLEARED


def _record_addition(param: Tensor, grad: Tensor, before: str | None, added: str) -> None:
    """Record ``grad``, of which ``before`` says what it was when a gradient that is ``added`` was added to it."""
    state = added if before in (None, _CLEARED, added) else _MIXED
    _write_record(grad, grad._version, state)
    if state == _SUM:
        setattr(param, _SUMMED_AT, param._version)
    elif state == _PART and hasattr(param, _SUMMED_AT):
        delattr(param, _SUMMED_AT)


@contextmanager
def adding_to_main_grad(param: Tensor) -> Iterator[None]:
    """Record ``param.main_grad`` after the block, which adds ``param.grad`` to it or makes it a copy of that."""
    main_grad: Tensor | None = getattr(param, "main_grad", None)
    if param.grad is None or not is_sequence_parallel(param):
        yield
        return
    before = None if main_grad is None else _state_of(param, main_grad)
    added = _state_of(param, param.grad)
    yield
    total = gradient_of(param)
    assert total is not None
    _record_addition(param, total, before, _MIXED if added == _CLEARED else added)


def _before_accumulation(ledger: weakref.ref[GradientLedger], known: weakref.ref[Tensor], grad: Tensor) -> None:
    """Hook on the incoming gradient, ``grad``: note what it is and what it will be added to."""
    param, owner = known(), ledger()
    if param is None:
        return
    before = None if param.grad is None else _state_of(param, param.grad)
    state = _PART if owner is None else owner._state_of_unknown(grad)
    setattr(param, _ARRIVAL, tuple(_Arrival(before, state, _storage_of(grad))))


def _after_accumulation(param: Tensor) -> None:
    """Hook on ``param.grad`` when backward has added to it; ``adding_to_main_grad`` follows where that is in use."""
    grad = param.grad
    if grad is None:
        return
    if hasattr(param, _ARRIVAL):
        arrival = _Arrival(*getattr(param, _ARRIVAL))
        delattr(param, _ARRIVAL)
        before, added = arrival.before, arrival.state
    else:  # a graph's replay, which runs the hooks on results alone
        before, added = _state_of(param, grad, writes=1), _PART
    record = _record_of(grad)
    if record is not None and record.state == _SUM and record.version == grad._version:
        return  # another hook, which ran before this one, has summed the total
    _record_addition(param, grad, before, added)


def _note_sum_of_arrival(tensor: Tensor) -> None:
    """Note that a hook has summed ``tensor`` while a gradient is on its way into a parameter."""
    node: Any = torch._C._current_autograd_node()
    param = getattr(node, "variable", None)  # of AccumulateGrad, whose hooks are running
    if not isinstance(param, Tensor) or not hasattr(param, _ARRIVAL):
        return
    arrival = _Arrival(*getattr(param, _ARRIVAL))
    # another tensor, such as a clone, may take the incoming gradient's place or be dropped: not known
    state = _SUM if arrival.storage == _storage_of(tensor) else _MIXED
    setattr(param, _ARRIVAL, tuple(arrival._replace(state=state)))


def _storage_of(tensor: Tensor) -> int:
    """The address of the tensor's storage; 0 where it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


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


class _UnknownSums(NamedTuple):
    """Sums in one storage that are no gradient of a known parameter.

    Attributes:
        storage: keeps its address from being used again, so that a key means one storage.
        passes: the backward pass that made the sum (-1: none), by first element, one after the last, and their number.
    """

    storage: StorageWeakRef
    passes: dict[tuple[int, int, int], int]


@dataclass
class GradientLedger:
    """The parameters that the library has seen, and the storages of sums that belong to none of them.

    Args:
        functional_mappings: mappings write to no input, also outside autograd: a region that runs twice must not.
    """

    functional_mappings: bool = False
    _params: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)  # by id: tensors compare by element
    _unknown_sums: dict[int, _UnknownSums] = field(default_factory=dict)  # by address
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

    def _observe(self, param: Tensor) -> None:
        """Hook on backward's accumulation; a parameter may be tagged after it was first seen."""
        if not (is_sequence_parallel(param) and param.requires_grad):
            return
        if _after_accumulation in (param._post_accumulate_grad_hooks or {}).values():
            return
        arrived = functools.partial(_before_accumulation, weakref.ref(self), weakref.ref(param))
        param.register_hook(arrived)
        own = param.register_post_accumulate_grad_hook(_after_accumulation)
        # First of all hooks, which run in the order of the dictionary: a script's hook may sum what it finds.
        hooks: Any = param._post_accumulate_grad_hooks
        for key in [key for key in hooks if key != own.id]:
            hooks[key] = hooks.pop(key)

    def needs_sum(self, param: Tensor, grad: Tensor | None = None) -> bool:
        """Whether the gradient of ``param`` is still this rank's part; it must have one.

        Args:
            param: a tagged parameter.
            grad: its gradient; default ``gradient_of(param)``.

        Raises:
            ValueError: it cannot be told, or no sum can be right any more.
        """
        grad = gradient_of(param) if grad is None else grad
        assert grad is not None
        self.track([param])
        record = _record_of(grad)
        if record is None:
            if self._state_of_unknown(grad) != _PART:
                raise ValueError(_message(param, _SEEN_TOO_LATE))
            if _was_replaced(param):
                raise ValueError(_message(param, _REPLACED))
            return True
        if record.state == _PART:
            return True
        if record.state == _MIXED:
            raise ValueError(_message(param, _MIXTURE))
        if record.version == grad._version:
            return False
        # Written to, and no backward pass since. Zeros are a sum and a part; this branch alone waits for the device.
        backend.mark_step()  # torch_xla may return wrong values when pending results are read one by one
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
                self._mark(param, grad)

    @staticmethod
    def _mark(param: Tensor, grad: Tensor) -> None:
        _write_record(grad, grad._version, _SUM)
        setattr(param, _SUMMED_AT, param._version)

    @contextmanager
    def writing_sum(self, tensor: Tensor, *, over_tensor_ranks: bool) -> Iterator[None]:
        """Record the gradients that an in-place sum of ``tensor``, done inside, is the sum of.

        Args:
            tensor: a gradient, an alias of one, a flat tensor that holds several, or something else.
            over_tensor_ranks: the ranks of the sum are those that share a sequence.

        Raises:
            ValueError: a gradient was summed already, or only a part of it is to be.
        """
        sharing = self._sharing(tensor)
        inside: list[tuple[Tensor, Tensor]] = []
        for param, grad in sharing if over_tensor_ranks else ():
            is_inside = _is_part_of(grad, tensor)
            if is_inside is None:
                raise ValueError(_message(param, _PARTIAL))
            if is_inside:
                inside.append((param, grad))
                if not self.needs_sum(param, grad):
                    raise ValueError(_message(param, _TWICE))
        with keep_sums([grad for _, grad in sharing]):
            yield
        for param, grad in inside:
            self._mark(param, grad)
        if over_tensor_ranks and not inside:
            self._note_unknown(tensor)

    def _sharing(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Tagged parameters and their gradients, of those in the storage of ``tensor``."""
        if tensor.is_inference() or not tensor.is_floating_point():
            return []
        storage = _storage_of(tensor)
        found: list[tuple[Tensor, Tensor]] = []
        for key, known in list(self._params.items()):
            param = known()
            if param is None:
                del self._params[key]
                continue
            # both: where gradients accumulate in main_grad, a hook may sum the grad that is to be added to it
            grads = (param.grad, getattr(param, "main_grad", None)) if is_sequence_parallel(param) else ()
            found += [(param, grad) for grad in grads if grad is not None and _storage_of(grad) == storage]
        return found

    def _note_unknown(self, tensor: Tensor) -> None:
        if tensor.is_inference() or not tensor.is_floating_point():
            return
        _write_record(tensor, tensor._version, _SUM)  # for a script that makes this tensor a gradient
        _note_sum_of_arrival(tensor)
        key = _storage_of(tensor)
        unknown = self._unknown_sums.setdefault(key, _UnknownSums(StorageWeakRef(tensor.untyped_storage()), {}))
        unknown.passes[(*_span(tensor), tensor.numel())] = torch._C._current_graph_task_id()
        if len(self._unknown_sums) > self._prune_above:
            self._unknown_sums = {key: each for key, each in self._unknown_sums.items() if not each.storage.expired()}
            self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._unknown_sums))

    def _state_of_unknown(self, grad: Tensor) -> str:
        """What a gradient without a record is, by the sums of its storage: a sum, if this backward pass made it."""
        unknown = self._unknown_sums.get(_storage_of(grad))
        state = _PART
        for (start, end, count), graph_task in () if unknown is None else unknown.passes.items():
            first, last = _span(grad)
            if start <= first and last <= end and count == end - start and graph_task >= 0:
                is_of_this_pass = graph_task == torch._C._current_graph_task_id()
                return _SUM if is_of_this_pass else _MIXED
            if first < end and start < last:
                state = _MIXED
        return state


_REMEDY = "sum it once, after the last backward pass of a step, and clear it by zero_grad() before the next"
_TWICE = f"was summed over the tensor-parallel ranks already, and would be summed twice: {_REMEDY}"
_MIXTURE = (
    "was summed over the tensor-parallel ranks, and a later backward pass added this rank's part to the sum, which no "
    f"further sum makes right: {_REMEDY}, and in no hook on an incoming gradient (zeroing through .data is not seen)"
)
_REPLACED = (
    "was summed over the tensor-parallel ranks, and another tensor was assigned to .grad since, of which is not known "
    "whether it is a sum: call grads.mark_sequence_parallel_gradients_summed if it is one, change .grad in place "
    "before the sum, or let backward() make a new gradient after zero_grad()"
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
