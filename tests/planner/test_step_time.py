"""The planned time of optimizer states on the host: what hides their copies, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner import step_time
from nxd_memopt.planner.hardware import GIB, device_named
from nxd_memopt.planner.model_configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.planner.plan import Plan, evaluate
from nxd_memopt.planner.problem import Problem, Setting

COPY = device_named("h200").host_copy_bytes_per_s


NORM_MLP = MemoryConfig(recompute_granularity="selective", recompute_modules=("norm", "mlp"))


def planned(
    tokens: int,
    micro_batches: int = 1,
    memory: MemoryConfig | None = None,
    *,
    fraction: float = 1.0,
    staging_gib: float = 2.0,
    **options,
) -> Plan:
    problem = Problem(
        config=with_defaults(NAMED_CONFIGS["llama-3-8b"]),
        device=device_named("h200"),
        devices=1,
        sequence_length=tokens,
        global_batch_size=micro_batches,
        stages=("none",),
        offloads_optimizer=True,
    )
    setting = Setting(
        1,
        "none",
        1,
        memory or MemoryConfig(),
        optimizer_offload_fraction=fraction,
        optimizer_staging_gib=staging_gib,
        grad_reduce_in_fp32=False,
        **options,
    )
    return evaluate(problem, setting)


def test_only_one_forward_hides_states_that_arrive_after_the_norm():
    """More micro-batches compute longer, but nearly all states wait for the norm of the last one."""
    few = planned(8192, 2, optimizer_update_in_forward=True)
    many = planned(8192, 16, optimizer_update_in_forward=True)
    copied_s = many.memory.host["optimizer states"] / COPY
    assert many.time.terms["matmuls"] > 1.5 * copied_s  # enough, if it hid the copies
    staged_s = many.memory.device["staging of optimizer states"] / COPY
    # With room for all states nothing waits, and the update itself is left.
    update_s = planned(8192, 16, staging_gib=200, optimizer_update_in_forward=True).time.terms["optimizer"]
    waited_s = copied_s - (many.time.terms["optimizer"] - update_s) - staged_s
    forward_s = (many.time.terms["matmuls"] + many.time.terms["attention"]) / 16 / 3
    assert waited_s == pytest.approx(forward_s, rel=0.1)  # attention has a rate of its own
    assert few.time.terms["optimizer"] == pytest.approx(many.time.terms["optimizer"], rel=0.01)


def test_staging_takes_states_before_the_norm():
    small, large = (planned(8192, 16, staging_gib=gib, optimizer_update_in_forward=True) for gib in (2, 42))
    staged = large.memory.device["staging of optimizer states"] - small.memory.device["staging of optimizer states"]
    assert staged == pytest.approx(40 * GIB, rel=0.01)
    saved = small.time.terms["optimizer"] - large.time.terms["optimizer"]
    assert saved == pytest.approx(staged / COPY)


def test_a_step_takes_at_least_the_time_of_its_copies():
    plan = planned(2048, staging_gib=100, optimizer_update_in_forward=True)
    assert plan.time.step_s >= plan.memory.host["optimizer states"] / COPY


def test_updates_after_backward_are_not_hidden():
    after, within = planned(8192), planned(8192, optimizer_update_in_forward=True)
    assert after.time.terms["optimizer"] > within.time.terms["optimizer"] > 0


@pytest.mark.parametrize(
    ("tokens", "memory", "fraction", "staging_gib", "measured_s"),
    [
        (8192, MemoryConfig(), 1.0, 48, 1.966),
        (16384, MemoryConfig(), 1.0, 60, 1.961),
        (8192, NORM_MLP, 0.47, 3, 1.528),
    ],
)
def test_recorded_steps(tokens, memory, fraction, staging_gib, measured_s):
    """Rows of LLaMA-3-8B in docs/benchmarks/state_offload.csv."""
    plan = planned(tokens, 1, memory, fraction=fraction, staging_gib=staging_gib, optimizer_update_in_forward=True)
    assert plan.time.step_s == pytest.approx(measured_s, rel=0.08)


def test_launches_of_a_slower_host_take_longer():
    """A step of few tokens waits for the host; a CUDA graph of it, or a long step, hardly."""

    def seconds(tokens: int, factor: float, *, cuda_graph: bool = False) -> float:
        device = device_named("h200")
        problem = Problem(
            config=with_defaults(NAMED_CONFIGS["llama-3-8b"]),
            device=replace(device, launch_s=factor * device.launch_s),
            devices=1,
            sequence_length=tokens,
            global_batch_size=1,
            stages=("none",),
        )
        return evaluate(problem, Setting(1, "none", 1, MemoryConfig(), cuda_graph=cuda_graph)).time.step_s

    assert seconds(512, 8) == pytest.approx(2 * seconds(512, 4), rel=0.1)
    assert seconds(16384, 2) == pytest.approx(seconds(16384, 1), rel=0.001)
    assert seconds(512, 2, cuda_graph=True) == pytest.approx(seconds(512, 1, cuda_graph=True), rel=0.02)


def mixtral(memory: MemoryConfig, *, ranks: int = 1) -> Plan:
    problem = Problem(
        config=with_defaults({**NAMED_CONFIGS["mixtral-8x7b"], "num_hidden_layers": 5}),
        device=device_named("h200"),
        devices=ranks,
        sequence_length=4608,
        global_batch_size=2,
        precision="bf16-true",
        stages=("none",),
    )
    return evaluate(problem, Setting(ranks, "none", 1, memory))


def test_small_kernels_of_routers_take_time_in_every_pass():
    """Measured on an H200: 0.318 s, of which 21 ms between kernels."""
    assert mixtral(MemoryConfig(recompute_granularity="full")).time.step_s == pytest.approx(0.318, rel=0.08)
    nested = mixtral(MemoryConfig(recompute_granularity="full", recompute_method="nested")).time.terms["elementwise"]
    full = mixtral(MemoryConfig(recompute_granularity="full")).time.terms["elementwise"]
    # Two micro-batches of five layers.
    assert nested - full >= 2 * 5 * 6e-4


@pytest.mark.parametrize("launches", ["collectives", "experts"])
def test_recompute_launches_its_collectives_and_experts_again(monkeypatch, launches):
    """Measured on two H200s: 0.256 to 0.372 s for nine layers, of which the plan had 0.15 to 0.28 s."""
    # A second for each layer: the host decides, and full recompute adds a half.
    monkeypatch.setattr(step_time, "HOST", replace(step_time.HOST, **{launches: 1.0}))
    full = MemoryConfig(recompute_granularity="full")
    waits = [mixtral(memory, ranks=2).time.terms["waiting for the host"] for memory in (MemoryConfig(), full)]
    assert waits[1] / waits[0] == pytest.approx(1.5, rel=0.05)
