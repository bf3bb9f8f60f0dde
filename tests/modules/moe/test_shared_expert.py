"""The shared expert in float64 from its definition, y = routed(x) + sigmoid(x g) MLP(x), on every split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxd_memopt.architectures.parameters import shardings
from nxd_memopt.config import ParallelConfig
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.models.gpt_neox import GPTNeoXMLP
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.mlp import GatedMLP
from nxd_memopt.modules.moe import MoELayer, empty_rows
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.dist.pool import distributed
from tests.modules.moe.definitions import Options, Weights, moe_forward
from tests.modules.moe.test_moe_layer import (
    EXPERTS,
    HIDDEN,
    TOLERANCE,
    WIDTH,
    local,
    micro_batch,
    parameters,
    sharded,
    sum_over,
)
from tests.reference import relative_error, shard, tensors
from tests.reference_models import gpt_neox_config

SHARED = 12  # another width than that of the routed experts
KINDS = ("gated MLP", "gated MLP with a gate", "GPT-NeoX's MLP with a gate")


class Shared:
    """Full weights of a shared expert, by name, and its definition for one token."""

    def __init__(self, kind: str) -> None:
        self.has_gate = kind.endswith("a gate")
        self.is_neox = kind.startswith("GPT-NeoX")
        columns = ("dense_h_to_4h",) if self.is_neox else ("gate_proj", "up_proj")
        self.row = "dense_4h_to_h" if self.is_neox else "down_proj"
        shapes = {f"{name}.weight": (SHARED, HIDDEN) for name in columns} | {f"{self.row}.weight": (HIDDEN, SHARED)}
        if self.is_neox:
            shapes |= {"dense_h_to_4h.bias": (SHARED,), "dense_4h_to_h.bias": (HIDDEN,)}
        if self.has_gate:
            shapes["gate"] = (HIDDEN,)
        self.full = {name: tensors(*shape, seed=60 + i) * 0.5 for i, (name, shape) in enumerate(shapes.items())}

    def of_token(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        if self.is_neox:
            inner = w["dense_h_to_4h.weight"] @ x + w["dense_h_to_4h.bias"]
            inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
            output = w["dense_4h_to_h.weight"] @ inner + w["dense_4h_to_h.bias"]
        else:
            gate = w["gate_proj.weight"] @ x
            output = w["down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (w["up_proj.weight"] @ x))
        return output / (1 + (-(w["gate"] * x).sum()).exp()) if self.has_gate else output

    def part(self, name: str, full: Tensor) -> Tensor:
        """This rank's part: rows of the first layers, columns of the last one; its bias is on every rank."""
        size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
        if name == "gate":
            return full.unsqueeze(0)
        if name == f"{self.row}.bias":
            return full
        return shard(full, int(name == f"{self.row}.weight"), size=size, rank=rank)

    def build(self, factory: LayerFactory, moe: MoEConfig) -> MoELayer:
        if self.is_neox:
            config = gpt_neox_config(hidden_size=HIDDEN, num_attention_heads=2)
            shared = GPTNeoXMLP(config, factory, SHARED)
        else:
            shared = GatedMLP(HIDDEN, SHARED, "silu", bias=False, factory=factory)
        layer = MoELayer(HIDDEN, WIDTH, "silu", moe, factory=factory, shared_expert=shared)
        with torch.no_grad():
            for name, param in self.parameters(layer).items():
                param.copy_(self.part(name, self.full[name]))
        return layer

    def parameters(self, layer: MoELayer) -> dict[str, Tensor]:
        found = {name: layer.shared_expert.get_parameter(name) for name in self.full if name != "gate"}
        return found | ({"gate": layer.shared_expert_gate.weight} if self.has_gate else {})


def check(
    kind: str, tensor: int, expert: int, sequence: bool, dispatcher: str, recompute: bool, moe: dict | None = None
) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
    model_parallel_manual_seed(7)
    shared = Shared(kind)
    options = MoEConfig(
        EXPERTS,
        moe_shared_expert_intermediate_size=SHARED,
        moe_shared_expert_gate=shared.has_gate,
        moe_token_dispatcher_type=dispatcher,
        **(moe or {}),
    )
    parallel = ParallelConfig(tensor, sequence_parallel_enabled=sequence, expert_model_parallel_size=expert)
    table = shardings("gpt_neox" if shared.is_neox else "llama")
    layer = shared.build(LayerFactory(table, parallel, 0.3, torch.float64, None), options)
    weights = Weights.random(EXPERTS, HIDDEN, WIDTH)
    with torch.no_grad():
        for param, mine in zip(parameters(layer), sharded(weights), strict=True):
            param.copy_(mine)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    x, upstream = (local(each, sequence) for each in micro_batch(rank))
    x.requires_grad_()
    rows = empty_rows(EXPERTS, x.device)
    output, _ = checkpoint(layer, x, rows) if recompute else layer(x, rows)
    (output * upstream).sum().backward()
    grads.allreduce_sequence_parallel_gradients(layer)
    # The definition, for the micro-batches of all data-parallel ranks.
    leaves = {name: full.clone().requires_grad_() for name, full in shared.full.items()}
    capacity = options.moe_expert_capacity_factor
    wanted = []
    for each in range(size):
        full, ahead = micro_batch(each)
        full.requires_grad_()
        routed = moe_forward(full, weights, Options(factor=capacity)).outputs
        total = routed + torch.stack([shared.of_token(row, leaves) for row in full.flatten(0, 1)]).view_as(full)
        (total * ahead).sum().backward()
        wanted.append((total.detach(), full.grad))
    assert relative_error(output.detach(), local(wanted[rank][0], sequence)) < TOLERANCE, "output"
    assert relative_error(x.grad, local(wanted[rank][1], sequence)) < TOLERANCE, "input gradient"
    for name, param in shared.parameters(layer).items():
        found = sum_over(param.grad, parallel_state.get_data_parallel_group())
        assert relative_error(found, shared.part(name, leaves[name].grad)) < TOLERANCE, f"gradient of {name}"


PADDED = {"moe_expert_capacity_factor": 0.8, "moe_pad_expert_input_to_capacity": True}


@distributed(world_size=1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind):
    check(kind, 1, 1, False, "allgather", True)
    check(kind, 1, 1, False, "allgather", False, PADDED)


# T, EP, sequence parallelism, dispatcher, recompute
SPLITS = {
    2: [(2, 1, True, "allgather", True), (2, 1, False, "alltoall", False), (1, 2, False, "alltoall", True)],
    4: [(2, 2, True, "alltoall", False), (2, 2, False, "allgather", True)],
}


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_split(kind, world_size):
    for split in SPLITS[world_size]:
        try:
            check(kind, *split)
        except AssertionError as error:
            error.add_note(str(split))
            raise
