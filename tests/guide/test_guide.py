"""AWS's developer guide for activation memory reduction: its blocks as a program, with our names and through the alias.

``tests/xla/test_guide.py`` runs the same tests on simulated NeuronCores.
"""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.dist.pool import run_on_ranks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ALIASED = {  # what a script of neuronx-distributed's would say
    "from nxd_memopt import memory\n": "import torch.utils.checkpoint\n",
    "memory.checkpoint(": "torch.utils.checkpoint.checkpoint(",
    "from nxd_memopt.parallel_layers": "from neuronx_distributed.parallel_layers",
    "from nxd_memopt.optimizer": "from neuronx_distributed.optimizer",
}


def neuronx_names(source: str) -> str:
    for ours, theirs in ALIASED.items():
        source = source.replace(ours, theirs)
    return source


def write_program(directory: Path, *, alias: bool) -> None:
    for name in ("modeling.py", "program.py"):
        source = (HERE / name).read_text(encoding="utf-8")
        (directory / name).write_text(neuronx_names(source) if alias else source, encoding="utf-8")


def run_on_two_ranks(directory: Path, *, alias: bool) -> subprocess.CompletedProcess[str]:
    write_program(directory, alias=alias)
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    program = [*(["-m", "nxd_memopt.compat"] if alias else []), str(directory / "program.py")]
    return subprocess.run([*torchrun, *program], capture_output=True, text=True, env=environment, timeout=500)


def run_in_a_rank(directory: str) -> str:
    """Run the guide's program, with the library's own names, on this rank of the pool; return what it prints."""
    sys.path.insert(0, directory)
    try:
        program = importlib.import_module("program")
        with redirect_stdout(io.StringIO()) as stdout:
            program.main()
    finally:
        sys.path.remove(directory)
        for name in ("program", "modeling"):
            sys.modules.pop(name, None)
    return stdout.getvalue()


def test_blocks_equal_one_rank_on_the_pool(tmp_path: Path) -> None:
    write_program(tmp_path, alias=False)
    for rank, printed in enumerate(run_on_ranks(run_in_a_rank, 2, str(tmp_path))):
        assert printed == f"guide: rank {rank} agrees on cpu by nxd_memopt.parallel_layers.layer_norm\n"


@pytest.mark.slow
@pytest.mark.parametrize("alias", [False, True], ids=["own-names", "alias"])
def test_blocks_equal_one_rank(alias: bool, tmp_path: Path) -> None:
    finished = run_on_two_ranks(tmp_path, alias=alias)
    assert finished.returncode == 0, finished.stderr[-6000:]
    package = "neuronx_distributed" if alias else "nxd_memopt"
    backend = os.environ["NXD_MEMOPT_BACKEND"]
    said = f"agrees on {backend} by {package}.parallel_layers.layer_norm"
    for rank in range(2):
        assert finished.stdout.count(f"guide: rank {rank} {said}") == 1, finished.stdout


def test_every_name_is_replaced() -> None:
    """The aliased program takes nothing of the guide's from this library's own names."""
    source = neuronx_names((HERE / "modeling.py").read_text(encoding="utf-8"))
    assert "import nxd_memopt" not in source and "from nxd_memopt" not in source
    assert source.count("torch.utils.checkpoint.checkpoint(self._attn, query, key, value, attention_mask") == 1
    assert source.count("from neuronx_distributed.parallel_layers") == 4
