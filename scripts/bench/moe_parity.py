"""Makes the parity table of models with experts: against transformers, over every split T x EP.

    python -m scripts.bench.moe_parity [--record] [--world-sizes 1 2 4]

Starts its own gloo ranks, up to 16. The exit status is 1 if a figure is above its bound.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.checkpointing import get_sharded_model_dict
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.parallel_layers.resharding import gather_experts, gather_full_tensor
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes
from scripts.bench.numerics_page import GRADIENT_BOUND, LOSS_BOUND, ON_OFF, YES_NO, record_rows
from scripts.bench.parity import free_port, relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
CASES = {
    "Mixtral, 8 experts, top 2": lambda: MixtralConfig(
        **SIZES, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2
    ),
    "Qwen3-MoE, 16 experts, top 4": lambda: Qwen3MoeConfig(
        **SIZES, intermediate_size=112, moe_intermediate_size=24, num_experts=16, num_experts_per_tok=4
    ),
    "Qwen2-MoE, 8 experts, top 2, shared": lambda: Qwen2MoeConfig(
        **SIZES,
        intermediate_size=112,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
    ),
}
RECOMPUTE = {
    "none": MemoryConfig(),
    "moe": MemoryConfig(recompute_granularity="selective", recompute_modules=("moe",)),
    "full": MemoryConfig(recompute_granularity="full"),
}
WORLD_SIZES = (1, 2, 4, 8, 16)
DISPATCHERS: tuple[Literal["allgather", "alltoall"], ...] = ("allgather", "alltoall")


@dataclass(frozen=True)
class Row:
    """The worst figures of one split over data-parallel ranks and recompute settings."""

    case: str
    tensor: int
    expert: int
    sequence_parallel: bool
    dispatcher: str
    loss_error: float
    gradient_error: float
    worst_parameter: str
    bit_equal: bool

    @property
    def holds(self) -> bool:
        """Whether the figures are within their bounds."""
        return self.loss_error <= LOSS_BOUND and self.gradient_error <= GRADIENT_BOUND and self.bit_equal


def batch(data_rank: int) -> Tensor:
    """Return the token ids of a data-parallel rank."""
    return torch.randint(SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(data_rank))


def reference_step(config: Any, data_ranks: int) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """Return transformers' weights, the loss of each rank's batch and the gradients of their mean."""
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for param in reference.parameters():
            if param.dim() == 1:
                param.add_(0.3 * torch.randn(param.shape))
    losses: list[Tensor] = []
    for rank in range(data_ranks):
        loss = reference(batch(rank), labels=batch(rank)).loss
        (loss / data_ranks).backward()
        losses.append(loss.detach())
    gradients = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    return copy.deepcopy(reference.state_dict()), losses, gradients


def build(config: Any, state: dict[str, Tensor], sequence_parallel: bool, dispatcher: Any, memory: MemoryConfig) -> Any:
    """Return our model with this rank's part of the full weights."""
    parallel = ParallelConfig(
        parallel_state.get_tensor_model_parallel_size(),
        sequence_parallel_enabled=sequence_parallel,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_size(),
    )
    moe = MoEConfig(
        config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_load_balancing_type="hf_aux_loss",
        moe_aux_loss_coeff=config.router_aux_loss_coef,
        moe_router_pre_softmax=not getattr(config, "norm_topk_prob", True),
        moe_token_dispatcher_type=dispatcher,
    )
    model = model_class(config.model_type)(config, parallel=parallel, memory=memory, moe=moe)
    model.load_state_dict(get_sharded_model_dict(model, state))
    return model


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's loss, and the gradients after all reductions."""
    model_parallel_manual_seed(11)
    ids = batch(parallel_state.get_data_parallel_rank())
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    grads.bucket_allreduce_gradients(model)
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def worst_gradient(model: nn.Module, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error over all parameters; valid on rank 0 only."""
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    worst = (0.0, "")
    for name, param in model.named_parameters():
        copy_tensor_model_parallel_attributes(ours[name], param)
        full = gather_full_tensor(gather_experts(ours[name]))
        if full is not None:
            worst = max(worst, (relative_error(full, theirs[name]), name))
    return worst


def splits(world_size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield T, EP and sequence parallelism."""
    for tensor in (1, 2, 4):
        for expert in (1, 2, 4):
            if tensor * expert != world_size:
                continue
            yield tensor, expert, False
            if tensor > 1:
                yield tensor, expert, True


def compare(case: str, sequence_parallel: bool, dispatcher: str) -> Row:
    """Return the worst figures over the recompute settings, on the present process groups."""
    config = CASES[case]()
    data_ranks = parallel_state.get_data_parallel_size()
    state, losses, theirs = reference_step(config, data_ranks)
    loss_error = 0.0
    worst = (0.0, "")
    first: dict[str, Tensor] = {}
    is_equal = True
    for memory in RECOMPUTE.values():
        model = build(config, state, sequence_parallel, dispatcher, memory)
        loss, ours = step(model)
        error = relative_error(loss, losses[parallel_state.get_data_parallel_rank()])
        errors = backend.all_reduce(torch.tensor(error), parallel_state.get_data_parallel_group(), op="max")
        loss_error = max(loss_error, errors.item())
        first = first or {name: grad.clone() for name, grad in ours.items()}
        is_equal = is_equal and all(torch.equal(grad, first[name]) for name, grad in ours.items())
        worst = max(worst, worst_gradient(model, ours, theirs))
    same = backend.all_reduce(torch.tensor(float(is_equal)), parallel_state.get_world_group(), op="min")
    return Row(
        case,
        parallel_state.get_tensor_model_parallel_size(),
        parallel_state.get_expert_model_parallel_size(),
        sequence_parallel,
        dispatcher,
        loss_error,
        *worst,
        bool(same.item() == 1),
    )


def run_rank(rank: int, world_size: int, port: int, results: Any) -> None:
    """Run all splits of one world size on one rank; rank 0 puts the rows into ``results``."""
    torch.set_num_threads(1)
    if world_size > 1:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    rows: list[Row] = []
    for tensor, expert, sequence_parallel in splits(world_size):
        parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
        for case in CASES:
            for dispatcher in DISPATCHERS:
                rows.append(compare(case, sequence_parallel, dispatcher))
        parallel_state.destroy_model_parallel()
    # A queue writes from a thread: join_thread waits until the rows are in the pipe.
    if rank == 0:
        results.put(rows)
        results.close()
        results.join_thread()


def run_world(world_size: int) -> list[Row]:
    """Start ``world_size`` ranks and return their rows."""
    results = get_context("spawn").Queue()
    context: Any = spawn(run_rank, args=(world_size, free_port(), results), nprocs=world_size, join=False)
    while not context.join(timeout=1):
        if not results.empty():
            break
    rows = results.get()
    while not context.join():
        pass
    return rows


def expert_row(row: Row) -> dict[str, str]:
    """Return the recorded row of a split."""
    return {
        "model": row.case,
        "tensor_parallel": str(row.tensor),
        "expert_parallel": str(row.expert),
        "sequence_parallel": ON_OFF[row.sequence_parallel],
        "dispatcher": row.dispatcher,
        "loss_error": f"{row.loss_error:.1e}",
        "gradient_error": f"{row.gradient_error:.1e}",
        "worst_parameter": row.worst_parameter,
        "bit_equal": YES_NO[row.bit_equal],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write docs/numerics/experts.csv")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=WORLD_SIZES, help="T x EP of the splits to run")
    arguments = parser.parse_args()
    rows = [row for world_size in arguments.world_sizes for row in run_world(world_size)]
    rows.sort(key=lambda row: list(CASES).index(row.case))
    if arguments.record:
        record_rows("experts", [expert_row(row) for row in rows])
    failed = [row for row in rows if not row.holds]
    print(f"{len(rows)} rows, {len(failed)} above their bounds", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
