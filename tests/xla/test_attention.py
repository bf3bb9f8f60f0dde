"""Attention on XLA: the memory of a compiled forward and backward, as XLA:CPU's buffer assignment gives it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import select_attention

LENGTH, HEADS, WIDTH, LAYERS = 1536, 2, 32, 2
COMPILE = f"""
import os, torch, torch_xla
from nxd_memopt.backends import backend
from nxd_memopt.ops.attention import core_attention
inputs = [torch.randn(1, {HEADS}, {LENGTH}, {WIDTH}).to(backend.device).requires_grad_() for _ in range(3)]
torch_xla.sync()
out = inputs[0]
for _ in range({LAYERS}):
    out = core_attention(out, *inputs[1:], implementation=os.environ["IMPLEMENTATION"])
out.square().mean().backward()
torch_xla._XLAC._xla_warm_up_cache([x.grad for x in inputs], [])
os._exit(0)
"""


def temporary_mib(directory: Path, implementation: str) -> float:
    """Bytes of the compiled graph that are neither arguments nor results, in MiB; XLA:CPU's barriers kept."""
    flags = f"--xla_dump_to={directory} --xla_dump_hlo_as_text --xla_disable_hlo_passes=cse_barrier_expander"
    environment = os.environ | {"XLA_FLAGS": flags, "IMPLEMENTATION": implementation}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [path.read_text(encoding="utf-8") for path in directory.glob("*memory-usage-report.txt")]
    sizes = [float(size) for text in reports for size in re.findall(r"size ([\d.]+)MiB, preallocated-temp", text)]
    return max(sizes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return {name: temporary_mib(tmp_path_factory.mktemp(name), name) for name in ("tiled", "math")}


def test_tiles_hold_a_fraction_of_what_the_plain_op_holds(measured):
    """The plain op holds every layer's scores; tiles hold none of them whole."""
    scores_mib = HEADS * LENGTH**2 * 4 / 2**20  # 18
    assert measured["math"] > LAYERS * scores_mib
    # 18 of 73 MiB here; without barriers between tiles, or before backward, more than half
    assert measured["tiled"] < measured["math"] / 3


def test_the_device_prefers_what_holds_least():
    assert backend.name == "xla" and select_attention("auto") == "tiled"  # the NKI kernels are not on this machine
