"""Records which sequence-parallel gradients were summed, so that none is summed twice or left unsummed.

A script may sum gradients with ``reduce_from_tensor_model_parallel_region(param.grad.data)`` and
then step an optimizer that sums them too. ``param.grad.data`` is another tensor object with another
version counter, but the same storage. So the record is an attribute of ``param.grad``, which is
found by its storage among the tracked parameters. A record has the gradient's state (this rank's
part, the sum, or a mixture) and its ``_version``, which every write that autograd sees increments.
A later write is fine if a backward pass follows it (zeroed, then computed again). Otherwise the
state is unknown, and asking for it is an error.

Two hooks on each parameter follow a backward pass. The first sees the incoming gradient, which a
script's hook or autograd Function may have summed; the second sees the gradient after accumulation.
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

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers.data_shards import local_gradient, local_rows
from nxd_memopt.parallel_layers.summed_storage import SummedStorage, is_part_of

RECORD = "sequence_sum_record"  # attribute of a gradient; plain values that can be saved with it
SUMMED_AT = "sequence_sum_at"  # attribute of a parameter: its _version at its gradient's sum
_INCOMING = "sequence_sum_arrival"  # attribute of a parameter between the two backward hooks
_PRUNE_ABOVE = 256  # storages; a step sums far fewer tensors that are no known gradient

# States of a gradient.
PART = "part"  # of this rank's sequence shard; a sum over the ranks is still needed
SUM = "sum"
MIXED = "mixed"  # a part was added to a sum, or it is unknown what was: no further sum is right
CLEARED = "cleared"  # a sum or mixture that was written to since; backward assumes zeros


class Record(NamedTuple):
    """The gradient's ``_version`` and state when it was recorded."""

    version: int
    state: str


class _Incoming(NamedTuple):
    """Incoming gradient: its destination's state (or None), its own state, its storage address."""

    before: str | None
    state: str
    storage: int


def gradient_of(param: Tensor) -> Tensor | None:
    """Return the gradient for the optimizer: ``main_grad`` if gradients accumulate in fp32.

    Of a parameter that is sharded over data-parallel ranks, return the rows of this rank.
    """
    main_grad = getattr(param, "main_grad", None)
    return local_gradient(param) if main_grad is None else main_grad


def is_sequence_parallel(param: Tensor) -> bool:
    """Return whether ``param`` is tagged: its gradient is a partial sum over sequence shards."""
    return bool(getattr(param, "sequence_parallel_enabled", False))


def record_of(grad: Tensor) -> Record | None:
    """Return the record of ``grad``, or None if no tracked backward pass or sum produced it."""
    values = getattr(grad, RECORD, None)
    if values is None:
        return None
    return Record(*values)


def write_record(grad: Tensor, version: int, state: str) -> None:
    """Record ``state`` for ``grad`` at its version ``version``."""
    setattr(grad, RECORD, (version, state))


@contextmanager
def keep_sums(grads: Iterable[Tensor]) -> Iterator[None]:
    """Keep summed gradients marked as sums; writes in the block must be linear (scale, average)."""
    # With each gradient the number of writes since its record. The writes in the block do not
    # count: the same number is restored after it, relative to the new version.
    recorded: list[tuple[Tensor, str, int]] = []
    for grad in grads:
        record = record_of(grad)
        if record is not None:
            recorded.append((grad, record.state, grad._version - record.version))
    yield
    # After all writes: gradients that are views of one tensor share its version counter.
    for grad, state, writes in recorded:
        write_record(grad, grad._version - writes, state)


def _was_replaced(param: Tensor) -> bool:
    """Return whether ``param.grad`` without a record replaces one summed since the last update.

    ``param.grad = param.grad / 2`` creates a tensor without a record. A gradient that a script
    assigns in the next step differs: the update in between increments the version of the parameter.
    """
    return getattr(param, SUMMED_AT, None) == _version_of(param)


def _version_of(param: Tensor) -> int:
    """Return the number of writes to ``param``; optimizers write to the rows of a sharded one."""
    return local_rows(param)._version


def state_of(param: Tensor, grad: Tensor, *, writes: int = 0) -> str:
    """Return the state of the gradient before the last ``writes`` writes to it."""
    record = record_of(grad)
    if record is None:
        if _was_replaced(param):
            return MIXED
        return PART
    if record.state == PART or record.version + writes == grad._version:
        return record.state
    return CLEARED


def record_addition(param: Tensor, grad: Tensor, before: str | None, added: str) -> None:
    """Record ``grad`` after a gradient in state ``added`` was added to it in state ``before``."""
    # Added to nothing, to zeros or to a gradient in the same state, the total has the added
    # state: parts add up to a part, sums to a sum. A part plus a sum is neither.
    state = added if before in (None, CLEARED, added) else MIXED
    write_record(grad, grad._version, state)
    if state == SUM:
        setattr(param, SUMMED_AT, _version_of(param))
    elif state == PART and hasattr(param, SUMMED_AT):
        delattr(param, SUMMED_AT)


def _before_accumulation(ledger: weakref.ref[GradientLedger], known: weakref.ref[Tensor], grad: Tensor) -> None:
    """Hook on the incoming gradient: store its state and the state of its destination."""
    # Weak references: hooks that held the parameter or the ledger would be cycles through
    # autograd, which the garbage collector cannot see.
    param = known()
    if param is None:
        return
    owner = ledger()
    before = None
    if param.grad is not None:
        before = state_of(param, param.grad)
    state = PART if owner is None else owner._state_of_unknown(grad)
    setattr(param, _INCOMING, tuple(_Incoming(before, state, _storage_of(grad))))


def _after_accumulation(param: Tensor) -> None:
    """Hook on ``param.grad`` after accumulation; ``adding_to_main_grad`` may follow."""
    grad = local_gradient(param)
    if grad is None:
        return
    if hasattr(param, _INCOMING):
        incoming = _Incoming(*getattr(param, _INCOMING))
        delattr(param, _INCOMING)
        before = incoming.before
        added = incoming.state
    else:
        # Replay of a CUDA graph, or FSDP2 with sharded gradients: both run only the hooks on
        # results. The replay itself is the one write to the gradient since the state before it.
        before = state_of(param, grad, writes=1)
        added = PART
    record = record_of(grad)
    if record is not None and record.state == SUM and record.version == grad._version:
        return  # another hook ran before this one and has summed the total
    record_addition(param, grad, before, added)


def _record_sum_of_incoming(tensor: Tensor) -> None:
    """Record that a hook has summed ``tensor`` during a parameter's gradient accumulation."""
    # Outside a backward pass there is no current node; in the hooks of another tensor the node is
    # not a parameter's AccumulateGrad and has no ``variable``.
    node: Any = torch._C._current_autograd_node()
    param = getattr(node, "variable", None)  # the parameter of AccumulateGrad, if its hooks run
    if not isinstance(param, Tensor) or not hasattr(param, _INCOMING):
        return
    incoming = _Incoming(*getattr(param, _INCOMING))
    # Another tensor, e.g. a clone, may replace the incoming gradient or be dropped: unknown.
    state = SUM if incoming.storage == _storage_of(tensor) else MIXED
    setattr(param, _INCOMING, tuple(incoming._replace(state=state)))


def _storage_of(tensor: Tensor) -> int:
    """Return the address of the tensor's storage; 0 if it has none."""
    if tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage()._cdata


@dataclass
class GradientLedger:
    """Tracked parameters, and the storages of sums that belong to none of them.

    Args:
        functional_mappings: no mapping may modify its input, even outside autograd. Set in
            regions that run twice.
    """

    functional_mappings: bool = False
    _params: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)  # by id(param)
    _unknown_sums: dict[int, SummedStorage] = field(default_factory=dict)  # by storage address
    _prune_above: int = _PRUNE_ABOVE

    def track(self, params: Iterable[Tensor]) -> None:
        """Recognize sums of the parameters' gradients from now on; keeps weak references."""
        for param in params:
            if not self._is_tracked(param):
                self._params[id(param)] = weakref.ref(param)
            self._observe(param)

    def _is_tracked(self, param: Tensor) -> bool:
        known = self._params.get(id(param))
        return known is not None and known() is param

    def _observe(self, param: Tensor) -> None:
        """Register the hooks once; a parameter may be tagged after it was first tracked."""
        if not (is_sequence_parallel(param) and param.requires_grad):
            return
        if _after_accumulation in (param._post_accumulate_grad_hooks or {}).values():
            return
        before = functools.partial(_before_accumulation, weakref.ref(self), weakref.ref(param))
        param.register_hook(before)
        own = param.register_post_accumulate_grad_hook(_after_accumulation)
        # Run before other hooks, which may sum the gradient: hooks run in dictionary order.
        hooks: Any = param._post_accumulate_grad_hooks
        for key in [key for key in hooks if key != own.id]:
            hooks[key] = hooks.pop(key)

    def needs_sum(self, param: Tensor, grad: Tensor | None = None) -> bool:
        """Return whether the gradient of ``param`` is still this rank's part.

        Args:
            param: a tagged parameter with a gradient.
            grad: its gradient; default ``gradient_of(param)``.

        Raises:
            ValueError: the state is unknown, or the gradient is a mixture that no sum corrects.
        """
        if grad is None:
            grad = gradient_of(param)
        assert grad is not None
        self.track([param])
        record = record_of(grad)
        # Without a record no tracked backward pass has produced this gradient. It may be a sum
        # that was taken before the parameter was tracked, or a tensor that a script assigned.
        if record is None:
            if self._state_of_unknown(grad) != PART:
                raise ValueError(_message(param, _SEEN_TOO_LATE))
            if _was_replaced(param):
                raise ValueError(_message(param, _REPLACED))
            return True
        if record.state == PART:
            return True
        if record.state == MIXED:
            raise ValueError(_message(param, _MIXTURE))
        if record.version == grad._version:
            return False
        # Written to without a later backward. Zeros are fine; only this case waits for the
        # device. torch_xla may return wrong values if pending results are read one by one.
        backend.mark_step()
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
        write_record(grad, grad._version, SUM)
        setattr(param, SUMMED_AT, _version_of(param))

    @contextmanager
    def writing_sum(self, tensor: Tensor, *, over_tensor_ranks: bool) -> Iterator[None]:
        """Record which gradients an in-place sum of ``tensor`` inside the block covers.

        Args:
            tensor: a gradient, an alias of one, a flat tensor of several, or another tensor.
            over_tensor_ranks: the sum is over the ranks that share a sequence.

        Raises:
            ValueError: a gradient is already summed, or would be summed in part.
        """
        sharing = self._sharing(tensor)
        # Sums over other groups (data, context) are linear and leave every state as it is.
        inside: list[tuple[Tensor, Tensor]] = []
        if over_tensor_ranks:
            inside = self._require_unsummed(sharing, tensor)
        with keep_sums([grad for _, grad in sharing]):
            yield
        for param, grad in inside:
            self._mark(param, grad)
        if over_tensor_ranks and not inside:
            self._record_unknown_sum(tensor)

    def _require_unsummed(
        self, sharing: Iterable[tuple[Tensor, Tensor]], tensor: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters and gradients of ``sharing`` that are within ``tensor``.

        Raises:
            ValueError: one of them is a sum already, or overlaps ``tensor`` in part.
        """
        inside: list[tuple[Tensor, Tensor]] = []
        for param, grad in sharing:
            is_inside = is_part_of(grad, tensor)
            if is_inside is None:
                raise ValueError(_message(param, _PARTIAL))
            if is_inside:
                inside.append((param, grad))
                if not self.needs_sum(param, grad):
                    raise ValueError(_message(param, _TWICE))
        return inside

    def _sharing(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return tagged parameters with a gradient in the storage of ``tensor``."""
        if tensor.is_inference() or not tensor.is_floating_point():
            return []
        storage = _storage_of(tensor)
        found: list[tuple[Tensor, Tensor]] = []
        for key, known in list(self._params.items()):
            param = known()
            if param is None:
                del self._params[key]
                continue
            if not is_sequence_parallel(param):
                continue
            # Both: with main_grad accumulation, a hook may sum the grad before it is added.
            for grad in (local_gradient(param), getattr(param, "main_grad", None)):
                if grad is not None and _storage_of(grad) == storage:
                    found.append((param, grad))
        return found

    def _record_unknown_sum(self, tensor: Tensor) -> None:
        """Record the sum of a tensor that is not a gradient of a tracked parameter, or not yet."""
        if tensor.is_inference() or not tensor.is_floating_point():
            return
        write_record(tensor, tensor._version, SUM)  # a script may assign this tensor to .grad
        _record_sum_of_incoming(tensor)
        key = _storage_of(tensor)
        if key not in self._unknown_sums:
            self._unknown_sums[key] = SummedStorage(tensor)
        self._unknown_sums[key].add(tensor)
        # Remove freed storages when the number has doubled since the last time: amortized, each
        # sum costs a constant number of look-ups.
        if len(self._unknown_sums) > self._prune_above:
            self._unknown_sums = {key: sums for key, sums in self._unknown_sums.items() if not sums.is_freed()}
            self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._unknown_sums))

    def _state_of_unknown(self, grad: Tensor) -> str:
        """Return the state of an unrecorded gradient: a sum if this backward pass made it."""
        unknown = self._unknown_sums.get(_storage_of(grad))
        if unknown is None:
            return PART
        return {True: SUM, False: PART, None: MIXED}[unknown.covers(grad)]


_REMEDY = "sum it once, after the last backward pass of a step, and clear it by zero_grad() before the next"
_TWICE = f"was summed over the tensor-parallel ranks already, and would be summed twice: {_REMEDY}"
_MIXTURE = (
    "was summed over the tensor-parallel ranks, and a later backward pass added this rank's part "
    f"to the sum, which no further sum makes right: {_REMEDY}, and in no hook on an incoming "
    "gradient (zeroing through .data is not seen)"
)
_REPLACED = (
    "was summed over the tensor-parallel ranks, and another tensor was assigned to .grad since, of "
    "which is not known whether it is a sum: call grads.mark_sequence_parallel_gradients_summed if "
    "it is one, change .grad in place before the sum, or let backward() make a new gradient after "
    "zero_grad()"
)
_WRITTEN = (
    "was summed over the tensor-parallel ranks and written to since, and whether it is still a sum "
    "is not known: scale it before the sum or by grads.clip_grad_norm, or call "
    "grads.mark_sequence_parallel_gradients_summed if it is one"
)
_PARTIAL = "would be summed in part: pass all of it to reduce_from_tensor_model_parallel_region"
_SEEN_TOO_LATE = (
    "was summed by reduce_from_tensor_model_parallel_region before the library knew its parameter, "
    "and what was added since is not known: sum it once, or build the optimizer before the first "
    "backward pass"
)


def _message(param: Tensor, what: str) -> str:
    return f"the sequence-parallel gradient of a parameter of shape {list(param.shape)} {what}"
