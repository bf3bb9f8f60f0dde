"""Tests of the advice in an error of a device without free memory."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.training.runtime.distributed import init_distributed
from nxd_memopt.training.runtime.out_of_memory import out_of_memory_advice

GIB = 2**30


@pytest.mark.parametrize("setting", [None, "expandable_segments:True", "max_split_size_mb:512"])
@pytest.mark.parametrize("unused", [0, 31 * GIB])
def test_fragments_are_named_with_their_remedy(monkeypatch, setting, unused):
    monkeypatch.setattr(backend, "memory_allocated", lambda: 107 * GIB)
    monkeypatch.setattr(backend, "unused_bytes", lambda: unused)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if setting:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with pytest.raises(torch.OutOfMemoryError) as caught, out_of_memory_advice():
        raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")
    (note,) = caught.value.__notes__
    assert f"107.0 GiB of tensors and {unused / GIB:.1f} GiB of fragments" in note
    assert ("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then" in note) == (
        unused > 0 and setting == "max_split_size_mb:512"
    )
    assert "docs/memory.md" in note


def test_segments_are_extended_before_the_first_allocation(monkeypatch):
    calls: list[str] = []

    def start(**options):
        calls.append("process group")
        raise RuntimeError("no process group")

    monkeypatch.setattr(backend, "expand_segments", lambda: calls.append("segments"))
    monkeypatch.setattr(backend, "init_process_group", start)
    trainer = SimpleNamespace(distributed_timeout_minutes=1)
    config = SimpleNamespace(accumulation_steps=int, require_expert_ranks=int, trainer=trainer)
    with pytest.raises(RuntimeError, match="no process group"):
        init_distributed(cast(Any, config))
    assert calls == ["segments", "process group"]
