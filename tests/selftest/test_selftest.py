"""A planted fault is a failing line of the check that it is in, and ranks that end do not end the self-test."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch

from nxd_memopt import cli
from nxd_memopt.backends import backend
from nxd_memopt.launch.machine import Machine
from nxd_memopt.launch.platforms import Platform
from nxd_memopt.ops import norm
from nxd_memopt.ops import tiled_attention as tiled
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.selftest import attention, collectives, command, operators, ranks, training
from nxd_memopt.selftest.check import ABSENT, FAILED, PASSED, STARTED, Record
from nxd_memopt.selftest.ranks import Collector, Result, run_ranks
from nxd_memopt.selftest.worker import END, run_check
from tests.dist.pool import run_on_ranks


def failing(checks) -> list[str]:
    """The checks that fail in this process, each name once."""
    return list(dict.fromkeys(check.name for check in checks if run_check(check)[0] == FAILED))


def wrong_in_backward(normal):
    """Fault of a hand-written backward: the gradient misses a term of a few percent."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.05

    return lambda x, *others: normal(Wrong.apply(x), *others)


def test_a_fault_of_an_operator_fails_its_check_alone(monkeypatch):
    """In backward of RMSNorm, and in one attention: the reference is another implementation, and all others pass."""
    normal = tiled.scaled_scores
    monkeypatch.setattr(norm, "add_rms_norm", wrong_in_backward(norm.add_rms_norm))
    monkeypatch.setattr(tiled, "scaled_scores", lambda *arguments: 1.01 * normal(*arguments))
    checks = [*operators.checks(), *attention.checks()]
    assert failing(checks) == ["operator: residual + RMSNorm", "attention: tiled"]


def test_a_result_that_is_not_finite_fails(monkeypatch):
    normal = norm.add_rms_norm
    monkeypatch.setattr(norm, "add_rms_norm", lambda x, *others: normal(x / 0.0, *others))
    (check,) = [check for check in operators.checks() if "RMSNorm" in check.name]
    state, text, goes_on = run_check(check)
    assert (state, goes_on) == (FAILED, True) and "nan" in text


def failing_collectives() -> list[str]:
    """Rank 1 sends its rows of a reduce-scatter in another order."""
    normal = type(backend).reduce_scatter
    large, collectives._LARGE_SIZE = collectives._LARGE_SIZE, 1024
    if parallel_state.get_global_rank() == 1:
        backend.reduce_scatter = lambda tensor, group: normal(backend, tensor.roll(1, 0), group)
    try:
        return failing(collectives.checks([2]))
    finally:
        collectives._LARGE_SIZE = large
        vars(backend).pop("reduce_scatter", None)


def test_a_fault_of_a_collective_fails_its_check_alone():
    # The lists of ZeRO-1 are reduce-scattered too; the chunks have a call of their own.
    wrong = ["collective: reduce-scatter", "collective: ZeRO-1's lists"]
    assert run_on_ranks(failing_collectives, 2) == [wrong, wrong]


def test_another_loss_fails(monkeypatch):
    monkeypatch.setattr(training, "trained", lambda *arguments: ([4.5836] * training.STEPS, []))
    (check,) = [check for check in training.checks([1]) if check.name == "training: llama"]
    assert "loss of step 2 is 4.583600, recorded 4.3724" in run_check(check)[1]


def test_a_later_compilation_fails(monkeypatch):
    totals = [2, 3, 3, 4]
    monkeypatch.setattr(training, "trained", lambda *arguments: ([], totals))
    monkeypatch.setattr(backend, "step_counters", lambda: {"compiled graphs": 0}, raising=False)
    (check,) = [check for check in training.checks([1]) if check.name.startswith("compilations")]
    state, text, _ = run_check(check)
    assert state == FAILED and "[1, 0, 1]" in text


def test_the_checks_after_an_ended_rank_run(tmp_path, monkeypatch):
    """Results are those of all ranks: the rank that a signal or its time has ended is the cause, not the other one."""

    class Ranks:
        def __init__(self, arguments, processes, environ, *, remedy, watch):
            self.first, self.watch = int(arguments[-2]), watch

        def write(self, rank, index, name, state, text=""):
            with (tmp_path / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
                file.write(Record(index, name, "instead", state, text, 1.0 + rank).to_line())

        def run(self):
            for rank, index in ((0, self.first), (1, self.first)):
                self.write(rank, index, f"check {index}", STARTED)
            if self.first == 0:
                self.write(1, 0, "check 0", FAILED, "RuntimeError: connection closed")
                (tmp_path / "rank0.log").write_text("Fatal Python error: Aborted\nThread 1\n", encoding="utf-8")
                return 134
            if self.first == 1:
                self.write(0, 1, "check 1", FAILED, "RuntimeError: connection closed")
                (tmp_path / "rank0.log").write_text("a warning\n", encoding="utf-8")
                (tmp_path / "rank1.log").write_text("Timeout (0:04:00)!\nThread 1\n", encoding="utf-8")
                return 1
            self.write(0, 2, "check 2", PASSED, "good")
            self.watch()
            self.write(1, 2, "check 2", FAILED, "bad")
            for rank in (0, 1):
                self.write(rank, 3, "check 3", ABSENT, "none")
                self.write(rank, 4, END, PASSED)
            self.watch()
            return 0

    monkeypatch.setattr(ranks, "Agent", Ranks)
    shown: list[Result] = []
    run_ranks(["rest"], 2, {}, Collector(tmp_path, 2, shown.append), directory=tmp_path)
    first = "a rank was ended by SIGABRT: rank 0: Fatal Python error: Aborted"
    second = "a rank ended with exit status 1: rank 1: Timeout (0:04:00)!"
    wanted = [("check 0", FAILED, first), ("check 1", FAILED, second)]
    wanted += [("check 2", FAILED, "bad"), ("check 3", ABSENT, "none")]
    assert [(result.name, result.state, result.text) for result in shown] == wanted


@pytest.mark.slow
def test_ranks_that_end_are_started_again(tmp_path, capfd):
    """One is ended by a signal, one hangs: the checks after it still run."""
    shown: list[Result] = []
    collector = Collector(tmp_path, 2, shown.append)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    rest = [str(time.time() + 600), "1,2"]
    command = [sys.executable, "-m", "tests.selftest.ending_rank"]
    run_ranks(rest, 2, environ, collector, directory=tmp_path, command=command)
    found = {result.name: result for result in shown}
    assert shown == collector.results
    assert [result.state for result in shown] == [PASSED, FAILED, FAILED, FAILED, PASSED]
    assert found["differ_on_one_rank"].text == "0.5 of 0.1"
    assert "a rank was ended by SIGSEGV: rank 0: Fatal Python error: Segmentation fault" in found["end"].text
    assert "Timeout (0:00:02)!" in found["hang"].text
    assert found["hang"].instead == "without hang"
    assert "rank 0 was ended by SIGSEGV" in capfd.readouterr().err


@pytest.mark.slow
def test_all_checks_pass_here(tmp_path):
    assert command.main(["--nproc", "2", "--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["results"]
    assert len(results) > 40 and results[0]["name"] == "versions and backend"


def test_the_page_of_results(tmp_path, monkeypatch, capsys):
    """With the ranks replaced: lines, JSON and the exit status."""

    def run(arguments, processes, environ, collector, *, directory):
        assert (processes, arguments[1], environ["NXD_MEMOPT_BACKEND"]) == (4, "1,2,4", "cpu")
        collector.add(Result("one", PASSED, "figures\nmore", 0.1, "nothing"))
        collector.add(Result("two", FAILED, "3 of 2", 0.2, "memory.attention_backend: tiled"))

    monkeypatch.setattr(command, "run_ranks", run)
    output = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["nxd-memopt", "selftest", "--nproc", "4", "--output", str(output)])
    assert cli.main() == 1
    printed = capsys.readouterr().out
    assert "pass one (0.1 s): figures\n     more\n" in printed
    assert "FAIL two (0.2 s): 3 of 2\n     meanwhile: memory.attention_backend: tiled\n1 passed, 1 failed" in printed
    written = json.loads(output.read_text(encoding="utf-8"))
    assert [result["state"] for result in written["results"]] == [PASSED, FAILED]


@pytest.mark.parametrize(
    ("environ", "chips", "name"),
    [
        ({"NXD_MEMOPT_BACKEND": "xla"}, 0, "xla_cpu"),
        ({"NXD_MEMOPT_BACKEND": "xla"}, 1, "trn1-2xlarge"),
        ({"NXD_MEMOPT_BACKEND": "xla"}, 16, "trn1"),
        ({"NXD_MEMOPT_BACKEND": "neuron"}, 1, "trn2-3xlarge"),
        ({}, 16, "trn2"),
        ({}, 0, "cpu"),
    ],
)
def test_the_hosts_platform_and_environment(environ, chips, name, tmp_path, monkeypatch):
    """trn1's ranks have what the launcher gives them."""
    monkeypatch.setattr(ranks, "is_importable", lambda module: False)
    monkeypatch.setattr(Platform, "require_package", lambda self: None)
    (tmp_path / "dev").mkdir()
    for chip in range(chips):
        (tmp_path / f"dev/neuron{chip}").touch()
    machine = Machine(tmp_path, 1024, 1024)
    assert ranks.default_platform(environ, machine) == name
    processes = ranks.ranks_of(name, None, machine)
    variables = ranks.environment(name, processes, {}, machine)
    assert processes == {"trn1": 32, "trn2": 64, "trn2-3xlarge": 4}.get(name, 2)
    if name.startswith("trn1"):
        assert variables["PJRT_DEVICE"] == "NEURON" and variables["NEURON_RT_NUM_CORES"] == str(processes)
        assert "-O1" in variables["NEURON_CC_FLAGS"].split()
        assert ranks.sizes_of(name, processes) == ([1, 2, 4, 8, 32] if processes == 32 else [1, 2])
