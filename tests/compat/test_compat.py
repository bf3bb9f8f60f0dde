"""The alias for neuronx-distributed: each test runs it in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

TRAINING_STEP = """
    import torch
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.runtime as xr
    from neuronx_distributed.parallel_layers import grads, layers, parallel_state
    from neuronx_distributed.parallel_layers.random import model_parallel_xla_manual_seed

    dist.init_process_group("xla", init_method="pjrt://")
    parallel_state.initialize_model_parallel(2, skip_collective_init=True)
    assert xr.world_size() == dist.get_world_size() == 2 and xr.global_ordinal() == dist.get_rank()
    model_parallel_xla_manual_seed(7)
    sharded = dict(sequence_parallel_enabled=True, sequence_dimension=0, keep_master_weight=True)
    column = layers.ColumnParallelLinear(8, 12, gather_output=False, **sharded)
    row = layers.RowParallelLinear(12, 8, input_is_parallel=True, **sharded)
    model = torch.nn.Sequential(column, row).to("xla")
    full = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    for batch in pl.MpDeviceLoader([{"x": full.chunk(2)[xr.global_ordinal()]}], xm.xla_device()):
        loss = model(batch["x"]).square().sum()
        loss.backward()
        xm.mark_step()
    grads.allreduce_sequence_parallel_gradients(torch.optim.SGD(model.parameters(), lr=1.0))

    column_bias = xm.all_gather(column.bias.detach(), groups=parallel_state.get_tensor_model_parallel_group(True))
    row_bias = row.bias.detach().clone().requires_grad_()
    hidden = torch.nn.functional.linear(full, column.master_weight, column_bias)
    expected = (torch.nn.functional.linear(hidden, row.master_weight) + row_bias).square().sum()
    expected.backward()
    total = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), groups=[[0, 1]])
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=0)  # fp32: another order of summation
    torch.testing.assert_close(row.bias.grad, row_bias.grad, rtol=1e-5, atol=1e-5)  # fp32, as above
    halves = xm.reduce_scatter(xm.REDUCE_SUM, torch.arange(4.0), 0.5, 0, 2)
    assert halves.tolist() == [[0, 1], [2, 3]][xr.global_ordinal()]
    alone = [torch.tensor(float(xr.global_ordinal()))]
    assert xm.all_reduce(xm.REDUCE_MAX, alone, groups=[[0], [1]]) is alone and alone[0] == xr.global_ordinal()
    xm.all_reduce(xm.REDUCE_MAX, alone)
    assert alone[0] == 1 and xm.mesh_reduce("sum", xr.global_ordinal() + 1, sum) == 3
    weights = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0 * xr.global_ordinal())
    xm.reduce_gradients(torch.optim.SGD([*weights, torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    assert all(weight.grad.eq(1).all() for weight in weights)
    xm.reduce_gradients(torch.optim.SGD(weights, lr=1.0), groups=[[0], [1]])
    assert all(weight.grad.eq(0.5).all() for weight in weights)  # torch_xla divides by the world's size also then
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0 * xr.global_ordinal())
    xm.optimizer_step(torch.optim.SGD(weights, lr=0.5), barrier=True)
    assert all(weight.eq(-0.5).all() for weight in weights)  # the mean of 0 and 2, times lr
    assert xm.rendezvous("end", bytes([xr.global_ordinal()])) == [b"\\0", b"\\1"]
    closed = []
    xm.add_step_closure(closed.append, args=(total.item(),))
    xm.master_print("loss agrees", closed == [total.item()])
    rank = dist.get_rank()
    dist.destroy_process_group()
    # A store of its own: the first world's addresses are still in the launcher's.
    dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    assert parallel_state.get_tensor_model_parallel_group() is dist.group.WORLD, "not that of the destroyed world"
    both = torch.ones(1)
    dist.all_reduce(both, group=parallel_state.get_tensor_model_parallel_group())
    assert both.item() == 2
"""


def run(*arguments: str, path: Path = ROOT, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """``python arguments``, under torchrun with ``ranks``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environment |= {"NXD_MEMOPT_BACKEND": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_aliased_process():
    files = [str(Path(__file__).with_name(name)) for name in ("aliased.py", "example_names.py")]
    finished = run("-m", "nxd_memopt.compat", "-m", "pytest", "-q", *files)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # Options of the environment may frame the line.
    passed = re.search(r"\b(\d+) passed", finished.stdout)
    assert passed and int(passed[1]) >= 25, finished.stdout


def test_script_on_two_ranks(tmp_path):
    (tmp_path / "step.py").write_text(textwrap.dedent(TRAINING_STEP), encoding="utf-8")
    finished = run("-m", "nxd_memopt.compat", str(tmp_path / "step.py"), ranks=2)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("loss agrees True") == 1


@pytest.mark.slow
def test_script_gets_arguments_and_gives_the_exit_code(tmp_path):
    source = "import sys; print(sys.argv[1:], __name__, sys.path[0]); sys.exit(7)"
    (tmp_path / "script.py").write_text(source, encoding="utf-8")
    finished = run("-m", "nxd_memopt.compat", str(tmp_path / "script.py"), "--a", "b")
    assert finished.stdout.strip() == f"['--a', 'b'] __main__ {tmp_path.resolve()}"
    assert finished.returncode == 7
    missing = run("-m", "nxd_memopt.compat", "no_such_file.py")
    assert missing.returncode == 2 and "no such script: no_such_file.py" in missing.stderr


def test_installed_package_is_left_aside_with_a_notice(tmp_path):
    (tmp_path / "neuronx_distributed").mkdir()
    (tmp_path / "neuronx_distributed" / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    code = "import nxd_memopt.compat, neuronx_distributed.parallel_layers as p; print(p.__spec__.origin)"
    finished = run("-c", code, path=tmp_path)
    assert finished.stdout.strip() == "alias of nxd_memopt.compat"
    notices = [line for line in finished.stderr.splitlines() if line.endswith("is ignored")]
    assert len(notices) == 1 and "neuronx_distributed of" in notices[0] and str(tmp_path) in notices[0]


def test_no_test_installs_the_alias_in_its_own_process():
    """Importing nxd_memopt.compat installs it, for every later test of the process: tests.alias_modules does not."""
    tests = Path(__file__).resolve().parents[1]
    separate = {
        tests / "compat" / "aliased.py",
        tests / "compat" / "pipeline" / "materialized.py",
        tests / "xla" / "test_guide.py",
        tests / "nxd_upstream" / "nxd_test_driver.py",
    }  # programs of their own
    importing = re.compile(r"^(from nxd_memopt\.compat|import nxd_memopt\.compat|from nxd_memopt import compat)", re.M)
    found = [path for path in tests.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))]
    assert set(found) <= separate
