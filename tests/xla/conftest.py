"""Environment of the XLA track: one simulated NeuronCore per process; skips where torch_xla is missing."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder

import pytest

COMPILE_FAST = (  # cheaper machine code, a third of the compile time; the graph's optimisations stay
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

if PathFinder.find_spec("torch_xla") is None:  # not the stand-in of nxd_memopt.compat, which other tests install
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(NXD_MEMOPT_BACKEND="xla", PJRT_DEVICE="CPU", NEURON_CC_FLAGS="-O1", XLA_FLAGS=COMPILE_FAST)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of as many ranks in one process: torch_xla takes 8 seconds to start each rank."""
    for item in items:
        size = getattr(item, "callspec", None) and item.callspec.params.get("world_size")
        if size:
            item.add_marker(pytest.mark.xdist_group(f"ranks{size}"))
