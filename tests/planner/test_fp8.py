"""Plans of models whose linear layers multiply in float8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nxd_memopt.architectures.experts import fixed_options
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.hardware import GIB, device_named
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.backward import layer_moments
from nxd_memopt.planner.memory.forward import forward_temporaries
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.search.candidates import memories, tensor_parallel_sizes
from nxd_memopt.planner.search.plan import Plan, evaluate
from nxd_memopt.planner.search.problem import Problem, Setting
from nxd_memopt.planner.sizes.fp8_layers import Fp8Layers, rounded_layers
from nxd_memopt.planner.sizes.rank_model import ModelPart
from nxd_memopt.planner.sizes.states import StateLayout
from nxd_memopt.planner.techniques.peer_slots import slot_bytes
from nxd_memopt.planner.timing.step_work import fp8_cast_bytes, fp8_flops, matmul_flops, tensor_parallel_bytes
from tests.planner.storages import named, share_of, sizes_of
from tests.reference import assert_says, error_message

LLAMA = named("llama-3-8b")
ALL = Fp8Layers((True,) * 32)
ROWWISE = replace(ALL, is_rowwise=True)
NO_TECHNIQUES = MemoryConfig()
ON_GPU = Kernels(fused=True, attention="flash4")
FULL = MemoryConfig(recompute_granularity="full")


def problem(fp8: Fp8Layers | None, device: str = "h200", **options) -> Problem:
    return Problem(LLAMA, device_named(device), 1, 8192, precision="bf16-true", fp8=fp8, **options)


def plan(fp8: Fp8Layers | None) -> Plan:
    return evaluate(problem(fp8), Setting(cuda_graph=True))


# Measured on an H200 with 8,192 tokens, bf16-true, a CUDA graph: GiB with expandable segments, and milliseconds in
# another run, with cuBLAS's counter resets (docs/gpus.md).
MEASURED = [(None, 73.56, 732.7), (ALL, 72.29, 548.8), (ROWWISE, 72.31, 570.8)]


@pytest.mark.parametrize(("fp8", "gib", "step_ms"), MEASURED)
def test_measured_steps(fp8, gib, step_ms):
    found = plan(fp8)
    # In the graph's pool gradients find no room between some other tensors: 0.1 % in bf16, 0.6 % in float8.
    assert gib == pytest.approx(found.memory.device_bytes / GIB, rel=0.01)
    assert found.memory.reserved_bytes / GIB > gib
    assert step_ms == pytest.approx(1e3 * found.time.step_s, rel=0.03)


# The same of four layers of Mixtral-8x7B, with expandable segments.
@pytest.mark.parametrize(
    ("tokens", "is_rowwise", "gib", "step_ms"),
    [(8192, False, 48.52, 145.3), (8192, True, 48.53, 148.6), (16384, False, 51.67, 278.1)],
)
def test_measured_steps_of_experts(tokens, is_rowwise, gib, step_ms):
    fp8 = Fp8Layers((True,) * 4, is_rowwise)
    four = replace(problem(fp8), model=named("mixtral-8x7b", num_hidden_layers=4), sequence_length=tokens)
    found = evaluate(four, Setting(cuda_graph=True))
    # bf16 is planned 3 % too small for 8,192 tokens, to which float8 adds 0.47 GiB in the plan and in the step.
    assert gib == pytest.approx(found.memory.device_bytes / GIB, rel=0.06)
    assert found.memory.reserved_bytes / GIB > gib
    assert step_ms == pytest.approx(1e3 * found.time.step_s, rel=0.08)


def test_layers_at_the_ends_are_planned_as_bf16():
    sizes = [
        sizes_of(LLAMA, length=8192, rows=1, dtype="bfloat16", fp8=fp8)
        for fp8 in (None, ALL, Fp8Layers(rounded_layers(2, 32)))
    ]
    plain, rounded, mixed = (activations(each, NO_TECHNIQUES, ON_GPU).layer_bytes for each in sizes)
    assert mixed == plain[:2] + rounded[2:30] + plain[30:]
    # a byte less for each element of two inputs
    assert plain[0] - rounded[0] == pytest.approx(2 * 8192 * 4096, abs=64)
    part = ModelPart((1, 2), has_embedding=False, has_head=False)
    share = share_of(LLAMA, length=8192, rows=1, dtype="bfloat16", fp8=sizes[2].fp8, part=part)
    assert activations(share.sizes, NO_TECHNIQUES, ON_GPU).layer_bytes == (plain[1], rounded[2])


def test_layers_that_are_faster_in_bf16_are_planned_as_such():
    """With 512 tokens gate and up have 2^35.8 multiplications, and the other matmuls at most 2^34.8."""
    short, shorter = (sizes_of(LLAMA, length=length, rows=1, dtype="bfloat16", fp8=ALL) for length in (512, 256))
    assert short.fp8_linears(0) == {"mlp in"}
    assert shorter.fp8_linears(0) == set()
    assert fp8_flops(shorter, NO_TECHNIQUES) == fp8_cast_bytes(shorter, NO_TECHNIQUES) == 0


def test_temporary_tensors_of_backward():
    sizes = sizes_of(LLAMA, length=8192, rows=1, dtype="bfloat16", fp8=ALL)
    moments = layer_moments(sizes, NO_TECHNIQUES, ON_GPU)
    operands = {each.name: each.temporary.get("float8 operands") for each in moments}
    tokens, hidden, width, qkv = 8192, 4096, 14336, 6144
    assert operands == {
        "MLP, last projection": 2 * tokens * hidden + width * hidden + tokens * width,
        "MLP, first projections, gradient of the input": 2 * tokens * 2 * width + 2 * width * hidden,
        "MLP, first projections": tokens * 2 * width,
        "attention output projection": 2 * tokens * hidden + hidden * hidden + tokens * hidden,
        "attention": None,
        "query, key and value projections, gradient of the input": 2 * tokens * qkv + qkv * hidden,
        "query, key and value projections": tokens * qkv,
    }


def test_temporary_tensors_of_merged_branches():
    """GPT-NeoX-20B: 64 heads of 96, MLP of 24,576; on each of two ranks half of them."""
    neox = named("gpt-neox-20b")
    parallel = ParallelConfig(2, sequence_parallel_enabled=True)
    sizes = sizes_of(neox, parallel, 8192, 1, "bfloat16", fp8=Fp8Layers((True,) * 44))
    moments = {each.name: each.temporary for each in layer_moments(sizes, NO_TECHNIQUES, ON_GPU)}
    tokens, hidden, qkv, width = 8192, 6144, 9216, 12288
    inputs = moments["input projections"]
    # Columns of both gradients, and of the normalised rows: this rank's, gathered, and joined.
    assert inputs["gathered"] == tokens * hidden
    assert inputs["float8 operands"] == tokens * (qkv + width) + tokens * hidden + tokens // 2 * hidden
    assert inputs["normalised"] == inputs["inputs of the branches"] == 0
    before = moments["input projections, gradient of the input"]
    only_before = (qkv + width) * (tokens + hidden)
    assert before["float8 operands"] - inputs["float8 operands"] == only_before - tokens * hidden
    assert before["dX"] == 2 * 2 * tokens * hidden and before["dW"] == 0
    # The activation is computed again, and then its columns.
    rows = moments["output projections"]
    assert rows["activation"] == 2 * tokens * width
    assert rows["gathered"] == tokens * hidden
    assert rows["float8 operands"] == 2 * tokens * hidden + (hidden // 2 + width) * hidden + tokens * width


def test_forward_of_a_last_layer_that_is_not_recomputed():
    """The layer keeps its input in float8; in bf16 the input exists until the MLP returns."""
    sizes = sizes_of(LLAMA, length=8192, rows=1, dtype="bfloat16", fp8=ALL)
    memory = MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=31)
    kept = activations(sizes, memory, ON_GPU).layers[-1]
    tokens, hidden, width = 8192, 4096, 14336
    found = forward_temporaries(sizes, memory, ON_GPU, kept, has_slots=False)
    assert found == {"activation": 3 * tokens * width, "normed mlp input": 2 * tokens * hidden}
    assert forward_temporaries(sizes, FULL, ON_GPU, activations(sizes, FULL, ON_GPU).layers[-1], has_slots=False) == {}


def test_gathers_in_float8_have_slots_of_their_bytes():
    """Two slots for gathers, of a byte an element if all linear layers round, and two for reductions in bf16."""
    parallel = ParallelConfig(2, sequence_parallel_enabled=True)
    ends = Fp8Layers(rounded_layers(2, 32))
    slots = [
        slot_bytes(sizes_of(LLAMA, parallel, 32768, 1, "bfloat16", fp8=fp8), fused_loss=True, cuda_graph=False)
        for fp8 in (None, ALL, ends)
    ]
    assert slots == [each * 32768 * 4096 for each in (8, 6, 8)]


def test_work_of_matmuls_and_casts():
    sizes = sizes_of(LLAMA, length=8192, rows=1, dtype="bfloat16", fp8=ALL)
    tokens, hidden, width, qkv = 8192, 4096, 14336, 6144
    weights = hidden * (qkv + hidden + 3 * width)
    assert fp8_flops(sizes, NO_TECHNIQUES) == 32 * 6 * tokens * weights
    head = 6 * tokens * hidden * sizes.vocab
    assert matmul_flops(sizes, NO_TECHNIQUES) - fp8_flops(sizes, NO_TECHNIQUES) == head
    # Elements of inputs of column- and of row-parallel layers, of gradients of outputs, and of weights.
    once, twice = 2 * tokens * hidden, tokens * (hidden + width)
    gradients = tokens * (qkv + hidden + 2 * width + hidden)
    assert fp8_cast_bytes(sizes, NO_TECHNIQUES) == 32 * (6 * once + 8 * twice + 6 * gradients + 8 * weights)
    # Forward again, but the last projection.
    again = fp8_cast_bytes(sizes, FULL) - fp8_cast_bytes(sizes, NO_TECHNIQUES)
    repeated = hidden * (qkv + hidden + 2 * width)
    assert again == 32 * (6 * once + 5 * tokens * hidden + 5 * repeated)
    assert fp8_flops(sizes, FULL) - fp8_flops(sizes, NO_TECHNIQUES) == 32 * 2 * tokens * repeated
    half = replace(sizes, fp8=Fp8Layers((True, False) * 16))
    assert fp8_flops(half, NO_TECHNIQUES) == fp8_flops(sizes, NO_TECHNIQUES) / 2


def test_gathers_of_tensor_parallel_ranks_have_half_the_bytes():
    parallel = ParallelConfig(2, sequence_parallel_enabled=True)
    plain, rounded = (sizes_of(LLAMA, parallel, 8192, 1, "bfloat16", fp8=fp8) for fp8 in (None, ALL))
    sent = [tensor_parallel_bytes(each, NO_TECHNIQUES) for each in (plain, rounded)]
    # In each block the input, in forward and again for the weights' gradients, and the gradient of the output; a rank
    # sends half of it.
    assert sent[0] - sent[1] == 32 * 2 * 3 * 8192 * 4096 / 2


@pytest.mark.parametrize("device", ["a100", "trn1", "trn2"])
def test_devices_without_float8_matmuls(device):
    message = error_message(lambda: problem(ALL, device))
    assert_says(message, "trainer.fp8", "9.0", device.partition("-")[0], "null")


def test_search_keeps_what_float8_layers_support():
    long = replace(problem(ALL), sequence_length=65536)
    assert any(each.mlp_tile_tokens for each in memories(replace(long, fp8=None)))
    assert not any(each.mlp_tile_tokens or each.attention_head_groups for each in memories(long))
    odd = named("llama-3-8b", intermediate_size=14336 + 16)
    eight = replace(problem(ALL), model=odd, devices=8)
    assert tensor_parallel_sizes(replace(eight, fp8=None)) == [1, 2, 4, 8]
    assert tensor_parallel_sizes(eight) == [1]
    message = error_message(lambda: sizes_of(odd, ParallelConfig(2), 8192, 1, "bfloat16", fp8=ALL))
    assert_says(message, "16", "7176", "tensor_model_parallel_size")


def test_no_layer_is_left():
    assert_says(error_message(lambda: rounded_layers(2, 4)), "first_last_layers_bf16=2", "4", "less than 2")


def test_frozen_weights_in_float8_take_a_byte():
    """LLaMA-3-70B: 68.45 billion weights of linear layers, 2.1 billion of embedding and head, norms."""
    spec = named("llama-3-70b")
    stored = Fp8Layers((True,) * 80, least_products=0, stores_weights=True)
    shares = [
        share_of(spec, length=4096, rows=1, dtype="bfloat16", lora=LoraConfig(), fp8=fp8) for fp8 in (None, stored)
    ]
    plain, rounded = (share.frozen_bytes(StateLayout(2)) for share in shares)
    linears = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672)
    assert plain - rounded == linears
    assert (plain / GIB, rounded / GIB) == pytest.approx((131.4, 67.7), abs=0.1)


MIXTRAL = named("mixtral-8x7b")


def test_experts_of_mixtral():
    """8,192 tokens have 2,048 rows for each of 8 experts; half as many tokens are as fast in bf16."""
    options = {"rows": 1, "dtype": "bfloat16", "fp8": ALL}
    sizes, short = sizes_of(MIXTRAL, length=8192, **options), sizes_of(MIXTRAL, length=2048, **options)
    assert sizes.fp8_experts(0) and not short.fp8_experts(0)
    padded = MoEConfig(**fixed_options(MIXTRAL), moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    assert not sizes_of(MIXTRAL, length=8192, moe=padded, **options).fp8_experts(0)
    tokens, rows, hidden, width, qkv = 8192, 16384, 4096, 14336, 6144
    weight = 8 * hidden * width
    linears = tokens * hidden * (qkv + hidden)
    assert fp8_flops(sizes, NO_TECHNIQUES) == 32 * 6 * (linears + 3 * rows * hidden * width)
    plain = fp8_cast_bytes(replace(sizes, moe=replace(sizes.moe, has_biases=True)), NO_TECHNIQUES)
    # x, dY and the gradients of gate and up to both forms, the activation twice, and the weights.
    of_rows = 8 * rows * hidden + 6 * rows * hidden + 6 * rows * 2 * width + 10 * rows * width
    assert fp8_cast_bytes(sizes, NO_TECHNIQUES) - plain == 32 * (of_rows + 8 * 3 * weight)
    columns = rows + 8 * 128
    moments = layer_moments(sizes, NO_TECHNIQUES, ON_GPU)
    found = {each.name: each.temporary.get("float8 operands") for each in moments if each.name.startswith("MLP")}
    assert found == {
        "MLP, gradient of the activation": (rows + columns) * hidden + weight,
        "MLP, last projection": columns * (hidden + width),
        "MLP, gradient of the tokens": (rows + columns) * 2 * width + 2 * weight,
        "MLP, first projections": columns * (2 * width + hidden),
    }
    assert not any(each.temporary.get("copied rows") for each in moments)
