"""Finds operations in HLO text that Neuron's compiler refuses or rewrites (errors NCC_EVRF013, EVRF014, EVRF060)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nxd_memopt.backends.neuron import MOST_OF_TOP_K
from nxd_memopt.certify.measure import hlo

# Computations of a module: "%name (parameters) -> shape {", with its last instruction marked ROOT.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_ROOT = re.compile(r"^\s*ROOT %?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_NAMES = re.compile(r"%([\w.\-]+)")
# No integer path in the compiler, whatever is computed.
_NO_INTEGERS = ("dot", "all-reduce", "reduce-scatter", "reduce-window", "sort")
# Allowed with integers unless the computation that combines elements adds or multiplies.
_COMBINING = ("scatter", "reduce")


def unsupported(text: str) -> list[str]:
    """Return a line for each kind of operation of the module that is not allowed."""
    return sorted(set(_findings(text)))


def _findings(text: str) -> Iterator[str]:
    roots = _roots(text)
    found = list(hlo.instructions(text))
    for each in found:
        is_integer = each.shapes[0].dtype[0] in "su"
        kind = f"{each.opcode} of {each.shapes[0].dtype}"
        if is_integer and each.opcode in _NO_INTEGERS:
            yield kind
        if is_integer and each.opcode in _COMBINING:
            combiner = re.search(r"to_apply=%?([\w.\-]+)", each.rest)
            assert combiner is not None, each.rest
            if roots[combiner[1]] in ("add", "multiply"):
                yield f"{kind} with {roots[combiner[1]]}"
        if each.opcode == "rng-bit-generator" and "algorithm=rng_default" not in each.rest:
            yield f"{kind}: {each.rest}"
        if each.opcode == "sort" and (k := _k_of_sort(each, found)) > MOST_OF_TOP_K:
            yield f"sort, of which {k} elements are used"


def _roots(text: str) -> dict[str, str]:
    """Return the operation of each computation's result."""
    roots: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        computation = _COMPUTATION.match(line)
        root = _ROOT.match(line)
        if computation is not None:
            name = computation[1]
        elif root is not None:
            roots[name] = root[1]
    return roots


def _k_of_sort(sort: hlo.Instruction, found: list[hlo.Instruction]) -> int:
    """Return how many of the sorted elements are used: ``torch.topk`` is a sort and slices on XLA:CPU."""
    dimension = re.search(r"dimensions=\{(\d+)\}", sort.rest)
    assert dimension is not None
    names = {sort.name}
    names |= {each.name for each in found if each.opcode == "get-tuple-element" and sort.name in _operands(each)}
    users = [each for each in found if names & _operands(each) and each.name not in names]
    # All of them, if something other than a slice reads them.
    shapes = [(each if each.opcode == "slice" else sort).shapes[0] for each in users]
    return max(shape.dims[int(dimension[1])] for shape in shapes)


def _operands(instruction: hlo.Instruction) -> set[str]:
    return set(_NAMES.findall(instruction.rest))
