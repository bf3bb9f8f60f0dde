"""The mixture-of-experts layer: router, dispatch to the experts, and the router's statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.architectures.experts import expert_capacity
from nxd_memopt.backends import backend
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.modules.moe.capacity import queue_positions
from nxd_memopt.modules.moe.dispatcher import Dispatcher
from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.modules.moe.load_balancing import token_sums, with_row
from nxd_memopt.modules.moe.router import Router, Routing, initialize_replicated_
from nxd_memopt.modules.moe.shared_expert import SharedExpertGate
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.parallel_layers import mappings, parallel_state


class MoELayer(nn.Module):
    """Mixture of experts in place of an MLP: ``sum_j weight_j expert_j(x)`` over k experts per token.

    ``[B, S, H] -> [B, S, H]``; under sequence parallelism ``[s, B, H] -> [s, B, H]``. Names are those
    of Hugging Face's Mixtral: ``gate`` is the router.

    Args:
        hidden_size: H.
        intermediate_size: F, width of an expert; ``moe.moe_ffn_hidden_size`` has precedence.
        hidden_act: one of ``ops.activation.ACTIVATIONS``.
        moe: options.
        factory: builds the parameters.
        shared_expert: MLP that every token passes in addition, ``[B, S, H] -> [B, S, H]`` in the
            layout of this layer; its width is the sum over all shared experts.
        expert_class: gated MLPs without biases, or GPT-NeoX's.

    Raises:
        ValueError: the number of experts or their width cannot be divided over the ranks, a
            shared expert is missing or superfluous, the device needs a static form, or blocks another dispatcher.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        moe: MoEConfig,
        *,
        factory: LayerFactory,
        shared_expert: nn.Module | None = None,
        expert_class: type[Experts] = Experts,
    ) -> None:
        super().__init__()
        width = moe.moe_shared_expert_intermediate_size
        if (width is None) != (shared_expert is None):
            raise ValueError(
                f"moe_shared_expert_intermediate_size {width} and shared_expert {type(shared_expert).__name__} go "
                "together: pass both or neither"
            )
        _require_shapes(moe)
        self.moe = moe
        self.sequence_first = factory.parallel.sequence_parallel_enabled
        width = moe.moe_ffn_hidden_size or intermediate_size
        options: dict[str, Any] = {"dtype": factory.dtype, "device": factory.device}
        on_cpu = factory.parallel.use_cpu_initialization
        self.gate = Router(hidden_size, moe, sequence_parallel_enabled=self.sequence_first, **options)
        initialize_replicated_(self.gate.weight, factory.init_weight, on_cpu=on_cpu)
        self.experts = expert_class(
            moe.num_moe_experts,
            hidden_size,
            width,
            hidden_act,
            init_method=factory.init_weight,
            use_cpu_initialization=on_cpu,
            **options,
        )
        self.shared_expert = shared_expert
        self.shared_expert_gate = None
        if moe.moe_shared_expert_gate:
            self.shared_expert_gate = SharedExpertGate(hidden_size, factory=factory)
        # Set by ``MoECausalLM.balanced_over_step``: f_e and tokens of the step; and, while it counts them, that the
        # row counts choices for the balancing loss, without the routers' bias.
        self.step_means: Tensor | None = None
        self.counts_scored = False

    def forward(self, hidden: Tensor, rows: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output, and ``rows`` with this layer's row of ``RouterStatistics``.

        Args:
            hidden: ``[B, S, H]`` or ``[s, B, H]``.
            rows: ``[layers so far, 3 + 2 E]``, ``load_balancing.empty_rows`` for the first layer.
            mask: ``[B, S]`` or ``[s, B]``, 0 for tokens that do not count in losses and statistics,
                such as padding. They are routed like all others.
        """
        routing = self.gate(hidden)
        sums = token_sums(routing, self.moe, mask, sequence_first=self.sequence_first)
        if self.counts_scored:
            sums = replace(sums, chosen=sums.scored)
        rows = with_row(rows, sums, self.moe, self.step_means, training=self.training)
        output = self._routed(hidden, routing)
        if self.shared_expert is not None:
            shared = self.shared_expert(hidden)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(hidden) * shared
            output = output + shared
        return output, rows

    def _routed(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Return the output of the routed experts, reduced over the tensor-parallel ranks."""
        # Under sequence parallelism an all-gather of [s, B, H] in forward, and a reduce-scatter in backward.
        # Every tensor-parallel rank computes its columns of the experts for all tokens of the
        # micro-batch; the gradients of tokens and weights are partial sums, which backward adds.
        x = for_all_experts(hidden, sequence_parallel_enabled=self.sequence_first)
        weights = for_all_experts(routing.weights, sequence_parallel_enabled=self.sequence_first)
        experts = routing.experts
        if self.sequence_first:
            experts = mappings.gather_along_dim(experts, 0, mappings.resolve_group(None))
        tokens = experts.shape[:-1].numel()
        moe = self.moe
        top_k = experts.size(-1)
        capacity = None
        positions = None
        if moe.moe_expert_capacity_factor is not None:
            capacity = expert_capacity(tokens, top_k, moe.num_moe_experts, moe.moe_expert_capacity_factor)
            positions = self._positions(weights, experts, capacity)
        dispatcher = Dispatcher(
            moe.num_moe_experts,
            moe.moe_token_dispatcher_type,
            capacity,
            moe.moe_pad_expert_input_to_capacity,
            moe.moe_expert_block_size,
        )
        partial = dispatcher.run(
            x.reshape(tokens, -1),
            weights.reshape(tokens, top_k),
            experts.reshape(tokens, top_k),
            positions,
            self.experts,
        )
        return sum_over_experts(partial.view(x.shape), sequence_parallel_enabled=self.sequence_first)

    def _positions(self, weights: Tensor, experts: Tensor, capacity: int) -> Tensor:
        """Return ``[N, k]``: queues begin with the first position of each sequence, in both layouts."""
        top_k = experts.size(-1)
        if not self.sequence_first:
            weights, experts = weights.transpose(0, 1), experts.transpose(0, 1)
        positions = queue_positions(
            weights.reshape(-1, top_k),
            experts.reshape(-1, top_k),
            self.moe.num_moe_experts,
            self.moe.moe_token_drop_policy,
            capacity,
        ).view(experts.shape)
        if not self.sequence_first:
            positions = positions.transpose(0, 1)
        return positions.reshape(-1, top_k)


def _require_shapes(moe: MoEConfig) -> None:
    """Raise ``ValueError`` if ``moe`` has another form of shapes than the device or the dispatcher needs."""
    is_static = moe.moe_pad_expert_input_to_capacity or moe.moe_expert_block_size is not None
    if backend.shapes_are_static and not is_static:
        raise ValueError(
            f"the backend {backend.name} compiles fixed shapes, and the rows of an expert depend on the routing: "
            "set moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True, or moe_expert_block_size"
        )
    expert_size = parallel_state.get_expert_model_parallel_size()
    if moe.moe_expert_block_size is not None and expert_size > 1 and moe.moe_token_dispatcher_type != "allgather":
        # The static bound of an exchange is every token to every rank, which is an all-gather.
        raise ValueError(
            f"moe_expert_block_size {moe.moe_expert_block_size} and expert_model_parallel_size {expert_size} need "
            f"moe_token_dispatcher_type 'allgather', got {moe.moe_token_dispatcher_type!r}: set it"
        )


def for_all_experts(
    tensor: Tensor, *, sequence_parallel_enabled: bool, dim: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Return ``tensor`` of all tokens of the tensor-parallel ranks; backward sums over the ranks.

    Every rank computes a part of the columns of the experts, so that its gradient of a token is a part of the sum.
    """
    if sequence_parallel_enabled:
        return mappings.gather_from_sequence_parallel_region(tensor, dim, True, group)
    return mappings.copy_to_tensor_model_parallel_region(tensor, group)


def sum_over_experts(
    partial: Tensor, *, sequence_parallel_enabled: bool, dim: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Return the sum of the ranks' ``partial``, with sequence parallelism of this rank's tokens alone."""
    if sequence_parallel_enabled:
        return mappings.reduce_scatter_to_sequence_parallel_region(partial, dim, group)
    return mappings.functional_reduce_from_tensor_model_parallel_region(partial, group)
