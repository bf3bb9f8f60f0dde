"""Updates the records of summed gradients that are copied, overwritten or added to ``main_grad``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from nxd_memopt.parallel_layers.gradient_ledger import (
    CLEARED,
    MIXED,
    PART,
    RECORD,
    SUMMED_AT,
    gradient_of,
    is_sequence_parallel,
    record_addition,
    record_of,
    state_of,
    write_record,
)


def clear_sum_record(param: Tensor, grad: Tensor) -> None:
    """Mark ``grad`` as this rank's part again, after a write that autograd does not count."""
    for tensor, name in ((grad, RECORD), (param, SUMMED_AT)):
        if hasattr(tensor, name):
            delattr(tensor, name)


def move_sum_record(source: Tensor, target: Tensor) -> None:
    """Give ``target``, a copy of ``source``, the record of ``source``."""
    record = record_of(source)
    if record is None:
        write_record(target, target._version, PART)
        return
    # The same number of writes after the record as ``source`` has had: a sum that was written to
    # must not look untouched on the copy, which starts with its own version counter.
    later_writes = source._version - record.version
    write_record(target, target._version - later_writes, record.state)


@contextmanager
def adding_to_main_grad(param: Tensor) -> Iterator[None]:
    """Record ``param.main_grad`` after the block, which adds or copies ``param.grad`` to it."""
    main_grad: Tensor | None = getattr(param, "main_grad", None)
    if param.grad is None or not is_sequence_parallel(param):
        yield
        return
    before = None
    if main_grad is not None:
        before = state_of(param, main_grad)
    added = state_of(param, param.grad)
    yield
    total = gradient_of(param)
    assert total is not None
    # A destination in this state is assumed to be zero. A source is not: it is added to a total,
    # and whether it is a part or a sum is unknown.
    if added == CLEARED:
        added = MIXED
    record_addition(param, total, before, added)
