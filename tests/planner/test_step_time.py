"""The planned time of a step: copies of optimizer states, launches, experts, and data-parallel traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.planner.hardware import device_named, host_device
from nxd_memopt.planner.search.plan import Plan, evaluate
from nxd_memopt.planner.search.problem import Problem, Setting
from nxd_memopt.planner.timing import step_time
from nxd_memopt.planner.timing.step_time import StepTime, rates_of
from tests.planner.storages import named, sizes_of

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
        model=named("llama-3-8b"),
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
    """A step of few tokens waits for the host; a CUDA graph of it, or a long step, does not."""

    def time_of(tokens: int, factor: float, *, cuda_graph: bool = False) -> StepTime:
        device = device_named("h200")
        problem = Problem(
            model=named("llama-3-8b"),
            device=replace(device, launch_s=factor * device.launch_s),
            devices=1,
            sequence_length=tokens,
            global_batch_size=1,
            stages=("none",),
        )
        return evaluate(problem, Setting(1, "none", 1, MemoryConfig(), cuda_graph=cuda_graph)).time

    slow = time_of(512, 8)
    assert slow.step_s == pytest.approx(2 * time_of(512, 4).step_s, rel=0.1)
    # The range of a step that waits: the launches, and twice as many.
    assert slow.most_s == pytest.approx(2 * slow.step_s, rel=0.1)
    assert time_of(16384, 2) == time_of(16384, 1)
    graph = time_of(512, 8, cuda_graph=True)
    assert graph.uncertain_s == 0 and graph == time_of(512, 1, cuda_graph=True)


@pytest.mark.parametrize(
    ("model", "ranks", "memory", "expected"),
    [
        ("llama-3-8b", 2, MemoryConfig(), 2 * 2 * 32),
        ("llama-3-8b", 1, NORM_MLP, 3 * 32),
        ("mixtral-8x7b", 2, MemoryConfig(recompute_granularity="full"), 4 * 3 * 32),
    ],
)
def test_each_pass_of_a_layer_has_launches(model, ranks, memory, expected):
    """As many again with collectives, and twice as many with experts."""
    spec = named(model)
    sizes = sizes_of(spec, ParallelConfig(ranks), 512, 1, "bfloat16")
    assert step_time.launches(sizes, memory) == expected * step_time.LAUNCHES


def test_activations_that_may_stay_on_the_device_make_a_range():
    """Their copies go out only where memory is short; those of checkpoints always."""

    def time_of(memory: MemoryConfig) -> StepTime:
        return evaluate(replace(problem, devices=1), Setting(1, "none", 1, memory)).time

    problem = Problem(
        model=named("smollm2-135m", num_hidden_layers=4),
        device=replace(device_named("h200"), host_copy_bytes_per_s=1e8),
        devices=1,
        sequence_length=65536,
        precision="bf16-true",
    )
    layers = time_of(MemoryConfig(cpu_offloading_num_layers=4))
    assert layers.most_s > 2 * layers.step_s
    full = MemoryConfig(recompute_granularity="full", cpu_offloading_activations=True)
    assert time_of(full).uncertain_s == 0 < time_of(full).terms["copies to and from the host"]


def mixtral(memory: MemoryConfig, *, ranks: int = 1) -> Plan:
    problem = Problem(
        model=named("mixtral-8x7b", num_hidden_layers=5),
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
    # Two micro-batches; of five layers in chunks of two all but the last of a chunk run once more.
    assert nested - full >= 2 * 2 * 6e-4


def data_parallel_s(ranks: int, model: str = "llama-3-8b", **options) -> float:
    """Seconds of the data-parallel collectives of a step of two micro-batches per rank."""
    problem = Problem(
        model=named(model),
        device=device_named("h200"),
        devices=ranks,
        sequence_length=4096,
        global_batch_size=2 * ranks,
        precision="bf16-true",
    )
    setting = Setting(**{"sharding": "none", "memory": MemoryConfig(), **options})
    return evaluate(problem, setting).time.terms["data-parallel collectives"]


def test_overlapped_reduction_hides_a_part_of_the_gradients_traffic():
    exposed = rates_of(device_named("h200")).exposed
    assert data_parallel_s(8, overlap_grad_reduce=True) == pytest.approx(exposed * data_parallel_s(8))


def test_kept_weights_are_gathered_once():
    """Of three equal parts, two all-gathers and a reduce-scatter, one goes, but for embedding and head."""
    kept, again = (data_parallel_s(8, sharding="zero3", reshard_after_forward=value) for value in (False, True))
    layers = 32 * 218112000
    others = 8030261248 - layers
    assert kept / again == pytest.approx((2 * layers + 2 * others) / (3 * layers + 2 * others), rel=1e-6)


def test_experts_are_reduced_over_the_ranks_that_have_the_same_ones():
    """With one expert of eight on a rank no other rank has its gradients."""
    dense, experts = 1605640192, 32 * 3 * 4096 * 14336
    alone = data_parallel_s(8, "mixtral-8x7b", expert_model_parallel_size=8)
    replicated = data_parallel_s(8, "mixtral-8x7b")
    assert alone / replicated == pytest.approx(dense / (dense + 8 * experts), rel=1e-3)
    # Two ranks have each pair of experts: a half of an all-reduce, next to 7 / 8 of one over eight ranks.
    shared = data_parallel_s(8, "mixtral-8x7b", expert_model_parallel_size=4)
    expected = (7 / 8 * dense + 1 / 2 * 2 * experts) / (7 / 8 * (dense + 8 * experts))
    assert shared / replicated == pytest.approx(expected, rel=1e-3)


def test_instances_of_hybrid_sharding_reduce_their_shards_over_the_network():
    """Two hosts of eight GPUs: gathers stay on a host, and an eighth of the gradients crosses the network."""
    across, hybrid = (data_parallel_s(16, sharding="zero3", shard_ranks=ranks) for ranks in (16, 8))
    one_host = data_parallel_s(8, sharding="zero3")
    device = device_named("h200")
    rates = rates_of(device)
    # An all-reduce over two instances sends each shard once, in bf16, in both micro-batches.
    sent = 2 * 2 * 8030261248 / 8
    crossing_s = rates.exposed * sent / (device.host_link_bytes_per_s * rates.link)
    assert hybrid == pytest.approx(one_host + crossing_s, rel=1e-3)
    assert hybrid < across


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_gradients_are_reduced_in_the_given_dtype(sharding):
    """Mixed precision reduces in fp32, or in bf16 at half the traffic."""
    problem = Problem(
        model=named("llama-3-8b"),
        device=device_named("h200"),
        devices=8,
        sequence_length=4096,
    )
    wide, narrow = (
        evaluate(problem, Setting(sharding=sharding, grad_reduce_in_fp32=value)).time.terms["data-parallel collectives"]
        for value in (True, False)
    )
    assert narrow < wide


def test_rates_are_calibrated_where_the_parts_are_known():
    measured = {name: replace(device_named(name), measured=True) for name in ("h200", "trn2")}
    assert rates_of(measured["h200"]).is_calibrated
    assert not rates_of(measured["trn2"]).is_calibrated
    assert not rates_of(replace(host_device(8.0, 1), measured=True)).is_calibrated
