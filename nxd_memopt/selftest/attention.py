"""Compares every attention implementation of the device, forward and backward, with float64 on the CPU."""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.ops.attention import attention_implementation, core_attention, refusal
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.selftest.check import AbsentError, Check
from nxd_memopt.selftest.operators import FACTORS, error_of, judge, results

_HEADS, _KV_HEADS, _HEAD_SIZE = 2, 1, 64
_LENGTH = 1024  # two tiles; a multiple of what PyTorch's and TorchNeuron's kernels ask for
_LENGTHS = {"nki": 2048}
_DOCUMENT = 300
_OTHERS = {"tiled": "math", "math": "tiled"}


def checks() -> list[Check]:
    """Return a check of each implementation that the device lists, and one of documents in a row."""
    found: list[Check] = []
    for name in backend.attention_implementations:
        instead = f"memory.attention_backend: {_OTHERS.get(name, 'tiled')}"
        found.append(Check(f"attention: {name}", partial(compare, name), instead))
    instead = "memory.attention_backend: tiled, or data.isolate_documents: false"
    return [*found, Check("attention: documents in a row", partial(compare, None), instead)]


def compare(name: str | None) -> str:
    """Return the errors of an implementation in fp32 and bf16; None: of what runs for documents in a row.

    Raises:
        AbsentError: the implementation can run in neither dtype.
        CheckError: an error is above its bound.
    """
    length = _LENGTHS.get(name or "", _LENGTH)
    query = (1, _HEADS, length, _HEAD_SIZE)
    found: dict[torch.dtype, list[Tensor]] = {}
    figures: list[str] = []
    refused: list[str] = []
    for dtype in FACTORS:
        if name is None:
            chosen, _ = attention_implementation(query, _KV_HEADS, dtype=dtype, packed=True)
            figures.append(chosen)
            mask = _documents().to(backend.device)
        else:
            chosen, mask = name, None
            reason = refusal(name, AttentionCall(query, _KV_HEADS, masked=False, dropout_p=0.0, dtype=dtype))
            if reason is not None:
                refused.append(reason)
                continue
        attend = partial(core_attention, implementation=chosen, mask=mask)
        inputs = [tensor.to(backend.device) for tensor in _inputs(dtype, length)]
        found[dtype] = results(lambda q, k, v, attend=attend: (attend(q, k, v),), inputs, dtype, is_differentiable=True)
    if not found:
        raise AbsentError("; ".join(dict.fromkeys(refused)))
    backend.mark_step()
    for dtype, tensors in found.items():
        wanted = _wanted(dtype, length, is_packed=name is None)
        errors = [error_of(ours.cpu(), theirs) for ours, theirs in zip(tensors, wanted, strict=True)]
        figures.append(judge(errors, dtype, multiplies=True))
    return ", ".join(dict.fromkeys(figures))


def _inputs(dtype: torch.dtype, length: int) -> list[Tensor]:
    """Return query, key and value on the CPU, ``[B, h, S, d]`` and twice ``[B, g, S, d]``."""
    generator = torch.Generator().manual_seed(8)
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    return [torch.randn(1, number, length, _HEAD_SIZE, generator=generator).to(dtype) for number in heads]


def _documents() -> PackedDocuments:
    """Return four documents in the row."""
    starts = torch.zeros(1, _LENGTH, dtype=torch.bool)
    starts[:, ::_DOCUMENT] = True
    return PackedDocuments.from_starts(starts, 5)


@functools.cache
def _wanted(dtype: torch.dtype, length: int, *, is_packed: bool) -> list[Tensor]:
    """Return output and gradients in float64 on the CPU, from scores that exist in full."""
    positions = torch.arange(length)
    seen = positions.unsqueeze(1) >= positions
    if is_packed:
        documents = positions // _DOCUMENT
        seen = seen & (documents.unsqueeze(1) == documents)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        key, value = (tensor.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * _HEAD_SIZE**-0.5
        return [scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value]

    return results(attend, [tensor.double() for tensor in _inputs(dtype, length)], dtype, is_differentiable=True)
