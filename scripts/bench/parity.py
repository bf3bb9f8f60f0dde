"""Makes the parity table: our models against transformers over T, sequence parallelism and recompute.

    python -m scripts.bench.parity [--record]

Starts its own gloo ranks. The exit status is 1 if a figure is above its bound.
"""

from __future__ import annotations

import argparse
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import gather_full_tensor, local_slice
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.checkpointing import get_sharded_model_dict
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.mappings import scatter_to_sequence_parallel_region
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes
from scripts.bench.numerics_page import BF16_BOUND, GRADIENT_BOUND, LOSS_BOUND, ON_OFF, YES_NO, record_rows

WORLD_SIZES = (1, 2, 4)
LLAMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
NEOX: dict[str, Any] = {**LLAMA, "intermediate_size": 160}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Each case is a path of its own through the models: biases, shared and replicated KV heads (MQA has
# fewer KV heads than ranks), tied weights, scaled RoPE, and both residual forms of GPT-NeoX.
CASES: dict[str, Callable[[], Any]] = {
    "LLaMA MHA, biases": lambda: LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "LLaMA GQA, 2 KV heads": lambda: LlamaConfig(**LLAMA, num_key_value_heads=2),
    "LLaMA MQA": lambda: LlamaConfig(**LLAMA, num_key_value_heads=1),
    "LLaMA tied": lambda: LlamaConfig(**LLAMA, num_key_value_heads=4, tie_word_embeddings=True),
    "LLaMA rope-scaled": lambda: LlamaConfig(
        **LLAMA, num_key_value_heads=4, rope_parameters=LLAMA3_ROPE, max_position_embeddings=256
    ),
    "Mistral, window 16": lambda: MistralConfig(**LLAMA, num_key_value_heads=2, head_dim=12, sliding_window=16),
    "Qwen2, window 16 in layer 1": lambda: Qwen2Config(
        **LLAMA, num_key_value_heads=2, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "Qwen3, biases": lambda: Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=12, attention_bias=True),
    "GPT-NeoX parallel residual, rotary 0.25": lambda: GPTNeoXConfig(**NEOX, use_parallel_residual=True),
    "GPT-NeoX serial residual, rotary 0.25": lambda: GPTNeoXConfig(**NEOX, use_parallel_residual=False),
}
RECOMPUTE = {
    "none": MemoryConfig(),
    "selective": MemoryConfig(
        recompute_granularity="selective", recompute_modules=("core_attn", "norm", "mlp_act"), attention_backend="auto"
    ),
    "full": MemoryConfig(recompute_granularity="full"),
}
# The options in which a configuration may have its dropout probabilities.
DROPOUT = ("attention_dropout", "hidden_dropout")
# Loss, and gradients by the parameter's name.
StepResult = tuple[Tensor, dict[str, Tensor]]


@dataclass
class Row:
    """One row of a model.

    ``bit_equal`` compares loss and gradients with those of recompute none, without and with
    dropout.
    """

    case: str
    world_size: int
    sequence_parallel: bool
    recompute: str
    loss_error: float
    gradient_error: float
    worst_parameter: str
    bit_equal: bool

    @property
    def holds(self) -> bool:
        """Whether all figures are within their bounds."""
        return self.loss_error <= LOSS_BOUND and self.gradient_error <= GRADIENT_BOUND and self.bit_equal


@dataclass
class LayerRow:
    """Relative errors of one layer in bf16 against float64."""

    layer: str
    weight_dtype: str
    world_size: int
    sequence_parallel: bool
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether all errors are within the bound."""
        return all(error <= BF16_BOUND for error in self.errors.values())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected| in the 2-norm, computed in float64."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


# Models


def run_step(model: nn.Module, ids: Tensor) -> StepResult:
    """Return the loss and this rank's gradients after the sequence-parallel hook.

    Random streams are seeded first, so every call draws the same dropout.
    """
    model_parallel_manual_seed(11)
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    named = model.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def build(config: Any, state: dict[str, Tensor], sequence_parallel: bool, memory: MemoryConfig) -> nn.Module:
    """Return our model with this rank's shards of the full weights ``state``."""
    size = parallel_state.get_tensor_model_parallel_size()
    parallel = ParallelConfig(size, sequence_parallel_enabled=sequence_parallel)
    model = model_class(config.model_type)(config, parallel=parallel, memory=memory)
    model.load_state_dict(get_sharded_model_dict(model, state))
    return model


def worst_gradient(model: nn.Module, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error over all parameters; valid on rank 0 only."""
    # A gradient does not carry its parameter's shard attributes, which the gather needs. Every rank
    # gathers every parameter: the gather is a collective, though only rank 0 gets the result.
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    worst = (0.0, "")
    for name, param in model.named_parameters():
        copy_tensor_model_parallel_attributes(ours[name], param)
        full = gather_full_tensor(ours[name])
        if full is not None:
            worst = max(worst, (relative_error(full, theirs[name]), name))
    return worst


def compare_case(name: str) -> list[Row]:
    """Return the rows of one model: sequence parallelism off and on, times every recompute."""
    config = CASES[name]()
    torch.manual_seed(5)
    reference = transformers.AutoModelForCausalLM.from_config(config)
    # Norms are initialized to one and biases to zero. Noise is added so that an error in any
    # parameter changes the result.
    for param in reference.parameters():
        param.data.add_(torch.randn_like(param), alpha=0.05)
    ids = torch.randint(0, config.vocab_size, (2, 32))
    loss, theirs = _reference_step(reference, ids)
    state = reference.state_dict()
    size = parallel_state.get_tensor_model_parallel_size()
    modes = [False]
    if size > 1:
        modes.append(True)
    rows: list[Row] = []
    for sequence_parallel in modes:
        # The first recompute is "none": its results without and with dropout are the baseline for
        # bitwise equality of the others. Dropout is compared with this baseline only, because
        # transformers draws other random numbers.
        baseline: tuple[StepResult, StepResult] | None = None
        for recompute, memory in RECOMPUTE.items():
            model = build(config, state, sequence_parallel, memory)
            plain = run_step(model, ids)
            dropout_model = build(with_dropout(config), state, sequence_parallel, memory)
            dropped = run_step(dropout_model, ids)
            if baseline is None:
                baseline = (plain, dropped)
            equal = is_bit_equal(baseline[0], plain) and is_bit_equal(baseline[1], dropped)
            our_loss, ours = plain
            error, worst = worst_gradient(model, ours, theirs)
            row = Row(
                case=name,
                world_size=size,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                loss_error=relative_error(our_loss, loss),
                gradient_error=error,
                worst_parameter=worst,
                bit_equal=equal,
            )
            rows.append(row)
    return rows


def _reference_step(reference: nn.Module, ids: Tensor) -> StepResult:
    """Return loss and gradients of transformers' model."""
    loss = reference(ids, labels=ids).loss
    loss.backward()
    named = reference.named_parameters()
    return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


def with_dropout(config: Any) -> Any:
    """Return a copy of ``config`` with dropout 0.1."""
    changed = type(config).from_dict(config.to_dict())
    for name in DROPOUT:
        if hasattr(config, name):
            setattr(changed, name, 0.1)
    return changed


def is_bit_equal(first: StepResult, second: StepResult) -> bool:
    """Return whether loss and all gradients are bitwise equal on every rank."""
    # No early return on a difference: all ranks must take part in the all-reduce, whose minimum is
    # 0 if the values of one rank differ.
    first_loss, first_grads = first
    second_loss, second_grads = second
    equal_grads = all(torch.equal(grad, second_grads[name]) for name, grad in first_grads.items())
    local = torch.equal(first_loss, second_loss) and equal_grads
    world = parallel_state.get_world_group()
    everywhere = backend.all_reduce(torch.tensor(int(local)), world, op="min")
    return bool(everywhere.item())


# Layers in bf16


def compare_layer(layer: str, weight_dtype: torch.dtype, sequence_parallel: bool) -> LayerRow:
    """Return the errors of a linear layer with bf16 input against float64.

    An fp32 weight runs under autocast, as in mixed-precision training.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    options: Any = {"dtype": weight_dtype, "sequence_parallel_enabled": sequence_parallel}
    module: Any
    if layer == "column":
        module = ColumnParallelLinear(96, 80, gather_output=False, **options)
    else:
        module = RowParallelLinear(96, 80, input_is_parallel=True, **options)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 2, 96, generator=generator).bfloat16()
    upstream = torch.randn(16, 2, 80, generator=generator).bfloat16()
    # The reference has the same bf16 inputs and the gathered weights, so its error against ours is
    # that of the arithmetic alone, not of rounding the inputs.
    weight = gather_on_all(module.weight).double().requires_grad_()
    bias = gather_on_all(module.bias).double().requires_grad_()
    x_fp64 = x.double().requires_grad_()
    nn.functional.linear(x_fp64, weight, bias).backward(upstream.double())
    # Each rank compares its own shards with the same slices of the reference.
    local_x, local_upstream = local_inputs(layer, x, upstream, sequence_parallel)
    local_x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=weight_dtype == torch.float32):
        output = module(local_x)
    output.backward(local_upstream)
    grads.allreduce_sequence_parallel_gradients(module)
    grad_x, _ = local_inputs(layer, cast(Tensor, x_fp64.grad), upstream, sequence_parallel)
    pairs: Any = (
        ("dX", local_x.grad, grad_x),
        ("dW", module.weight.grad, float64_slice(weight.grad, module.weight)),
        ("db", module.bias.grad, float64_slice(bias.grad, module.bias)),
    )
    row = LayerRow(layer, str(weight_dtype).removeprefix("torch."), size, sequence_parallel)
    world = parallel_state.get_world_group()
    for name, actual, expected in pairs:
        local = torch.tensor(relative_error(actual, expected))
        row.errors[name] = backend.all_reduce(local, world, op="max").item()
    return row


def gather_on_all(param: Any) -> Tensor:
    """Return the full tensor of a sharded parameter on every rank, fp32."""
    # gather_full_tensor returns the tensor on rank 0 and None elsewhere: the sum broadcasts it.
    full = gather_full_tensor(param)
    if full is None:
        full = torch.zeros(param.full_shape)
    return backend.all_reduce(full.float(), parallel_state.get_world_group())


def float64_slice(full: Any, param: Any) -> Tensor:
    """Return this rank's shard of ``full``, sharded like ``param``, in float64."""
    probe = torch.empty_like(param, dtype=torch.float64)
    copy_tensor_model_parallel_attributes(probe, param)
    return local_slice(full, probe)


def local_inputs(layer: str, x: Tensor, upstream: Tensor, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """Return this rank's shard of the layer's input and of its output's gradient."""
    # A column-parallel layer shards its output's features, a row-parallel layer its input's. The
    # other tensor is replicated, or a sequence shard with sequence parallelism.
    group = parallel_state.get_tensor_model_parallel_group()
    sharded_features = {"column": upstream, "row": x}[layer]
    sharded_features = backend.shard(sharded_features, -1, group)
    sharded_sequence = {"column": x, "row": upstream}[layer]
    if sequence_parallel:
        sharded_sequence = scatter_to_sequence_parallel_region(sharded_sequence)
    local_x, local_upstream = sharded_features, sharded_sequence
    if layer == "column":
        local_x, local_upstream = sharded_sequence, sharded_features
    return local_x.detach().clone(), local_upstream.detach().clone()


# Ranks and report


def run_rank(rank: int, world_size: int, port: int, results: Any) -> None:
    """Run all cases on one rank; rank 0 puts the rows into ``results``."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    # Windows and dropout together have no fused kernel on any device.
    warnings.filterwarnings("ignore", message="attention materialises S x S weights")
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    rows = [row for name in CASES for row in compare_case(name)]
    layer_rows = [
        compare_layer(layer, dtype, sequence_parallel)
        for layer in ("column", "row")
        for dtype in (torch.bfloat16, torch.float32)
        for sequence_parallel in (False, True)
        if world_size > 1
    ]
    # A queue writes from a thread: join_thread waits until the rows are in the pipe, before the
    # process ends.
    if rank == 0:
        results.put((rows, layer_rows))
        results.close()
        results.join_thread()


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_world(world_size: int) -> tuple[list[Row], list[LayerRow]]:
    """Start ``world_size`` ranks and return their rows."""
    # The result is read while the ranks still run: rank 0 cannot end before its queue is read.
    # context.join raises the exception of a rank that failed, so that a failure does not wait here
    # for a result forever.
    results = get_context("spawn").Queue()
    arguments = (world_size, free_port(), results)
    context: Any = spawn(run_rank, args=arguments, nprocs=world_size, join=False)
    while not context.join(timeout=1):
        if not results.empty():
            break
    answer = results.get()
    while not context.join():
        pass
    return answer


def model_row(row: Row) -> dict[str, str]:
    """Return the recorded row of a model."""
    return {
        "model": row.case,
        "tensor_parallel": str(row.world_size),
        "sequence_parallel": ON_OFF[row.sequence_parallel],
        "recompute": row.recompute,
        "loss_error": f"{row.loss_error:.1e}",
        "gradient_error": f"{row.gradient_error:.1e}",
        "worst_parameter": row.worst_parameter,
        "bit_equal": YES_NO[row.bit_equal],
    }


def linear_row(row: LayerRow) -> dict[str, str]:
    """Return the recorded row of a linear layer."""
    return {
        "layer": row.layer,
        "weight": row.weight_dtype,
        "tensor_parallel": str(row.world_size),
        "sequence_parallel": ON_OFF[row.sequence_parallel],
        **{name.lower(): f"{error:.1e}" for name, error in row.errors.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write docs/numerics/models.csv and linear.csv")
    record = parser.parse_args().record
    # The rows are sorted by model; the sort is stable, so T stays in ascending order within it.
    rows: list[Row] = []
    layer_rows: list[LayerRow] = []
    for size in WORLD_SIZES:
        model_rows, linear_rows = run_world(size)
        rows += model_rows
        layer_rows += linear_rows
    rows.sort(key=lambda row: list(CASES).index(row.case))
    if record:
        record_rows("models", [model_row(row) for row in rows])
        record_rows("linear", [linear_row(row) for row in layer_rows])
    failed = [row for row in (*rows, *layer_rows) if not row.holds]
    count = len(rows) + len(layer_rows)
    print(f"{count} rows, {len(failed)} above their bounds", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
