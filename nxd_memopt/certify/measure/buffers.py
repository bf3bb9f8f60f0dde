"""Reads the buffer assignment of a compiled module: which temporary tensors exist at the same time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nxd_memopt.certify.measure.hlo import parse_shapes
from nxd_memopt.certify.measure.measurement import LiveTensor, largest_distinct

# Three kinds of lines: "allocation 0: size 4096, maybe-live-out:", each value in it,
# " value: <1 dot.9 @0> (size=4096,offset=0): f32[32,32]{1,0}", and further down its live range,
# "    dot.9{}:18-20", in steps of the schedule.
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @\d*.*?> \(size=(\d+),offset=(\d+)\): ([a-z]\S*)")
_RANGE = re.compile(r"^\s+(\S+?)(?:\{\})?:(\d+)-(\d+)$")
_SCRATCH = "preallocated-temp"
_RESULT = "maybe-live-out"


@dataclass(frozen=True)
class _Value:
    """An array of the module, at ``place``: allocation and offset, from step ``start`` to step ``end``."""

    tensor: LiveTensor
    place: tuple[int, int]
    start: int
    end: int


def temporary_bytes(buffer_assignment: str) -> int:
    """Return the most bytes of temporary tensors that exist at the same time, next to parameters and results.

    XLA also puts temporary tensors into the memory of results that are not written yet. In a training
    run this memory holds the sums of the gradients of earlier micro-batches and has no room for
    anything else: such tensors count as if they had memory of their own. Of LLaMA-2-7B's 64 MiB per layer on
    one of 8 ranks, 45 MiB were in the memory of gradients.
    """
    allocations = map(_ALLOCATION.match, buffer_assignment.splitlines())
    scratch = sum(int(each[2]) for each in allocations if each is not None and each[3].startswith(_SCRATCH))
    # Gaps between values make the scratch memory larger than their sum at any step.
    return max(scratch, _peak_bytes(_temporaries(buffer_assignment)))


def largest_temporaries(buffer_assignment: str) -> tuple[LiveTensor, ...]:
    """Return the largest distinct temporary tensors."""
    return largest_distinct(value.tensor for value in _temporaries(buffer_assignment))


def _temporaries(buffer_assignment: str) -> list[_Value]:
    """Return the arrays in scratch memory, and those in the memory of results that are not the results.

    Raises:
        ValueError: an array of this memory has no live range.
    """
    ranges = _live_ranges(buffer_assignment)
    last = max((end for _, end in ranges.values()), default=0)
    scratch: list[_Value] = []
    in_results: dict[int, list[_Value]] = defaultdict(list)
    number, kind = 0, ""
    # Each allocation is listed with the values that are assigned to it on the next lines.
    for line in buffer_assignment.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation is not None:
            number, kind = int(allocation[1]), allocation[3]
        value = _VALUE.match(line)
        # Tuples do not match: they are tables of pointers to values that are listed themselves.
        is_scratch = kind.startswith(_SCRATCH)
        if value is None or not (is_scratch or _RESULT in kind):
            continue
        # Leaving it out would make the peak, and with it the certificate, too small.
        if value[1] not in ranges:
            raise ValueError(
                f"{value[1]} of {value[2]} bytes in allocation {number} ({kind}) has no live range in XLA's buffer "
                "assignment: certify reads that of torch_xla 2.9"
            )
        (shape,) = parse_shapes(value[4])
        tensor = LiveTensor(shape.dtype, shape.dims, int(value[2]), value[1])
        start, end = ranges[value[1]]
        entry = _Value(tensor, (number, int(value[3])), start, end)
        if is_scratch:
            scratch.append(entry)
        else:
            in_results[number].append(entry)
    for values in in_results.values():
        scratch += _before_the_result(values, last)
    return scratch


def _live_ranges(buffer_assignment: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last step of each value, by its name.

    Raises:
        ValueError: the text has no live ranges.
    """
    _, found, text = buffer_assignment.partition("BufferLiveRange:")
    if not found:
        raise ValueError("XLA's buffer assignment has no live ranges: certify reads that of torch_xla 2.9")
    text, _, _ = text.partition("Live ranges at")
    matches = (_RANGE.match(line) for line in text.splitlines())
    return {match[1]: (int(match[2]), int(match[3])) for match in matches if match is not None}


def _before_the_result(values: Iterable[_Value], last: int) -> Iterator[_Value]:
    """Yield the values of a result's memory that are gone before the result, or what it overwrites, begins."""
    begin = None
    for value in sorted(values, key=lambda each: each.start, reverse=True):
        if value.end >= last or (begin is not None and value.end >= begin):
            # Exists until the end, or is changed in place into what does.
            begin = value.start if begin is None else min(begin, value.start)
        else:
            yield value


def _peak_bytes(values: Iterable[_Value]) -> int:
    """Return the largest sum of the bytes of the values that exist at the same step.

    Values at one place whose ranges overlap share their bytes: the later one reuses those of the earlier one.
    """
    by_place: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    for value in values:
        by_place[value.place].append(value)
    changes: dict[int, int] = defaultdict(int)
    for shared in by_place.values():
        shared.sort(key=lambda each: each.start)
        end = -1
        size = 0
        for value in shared:
            if value.start <= end:
                # Reused: the earlier value ends where this one begins.
                changes[value.start] -= size
                changes[end + 1] += size
            size, end = value.tensor.nbytes, max(end, value.end)
            changes[value.start] += size
            changes[end + 1] -= size
    total = highest = 0
    for step in sorted(changes):
        total += changes[step]
        highest = max(highest, total)
    return highest
