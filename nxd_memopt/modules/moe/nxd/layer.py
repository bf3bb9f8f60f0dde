"""The mixture-of-experts layer with neuronx-distributed's name ``MoE``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.modules.moe.moe_layer import for_all_experts, sum_over_experts
from nxd_memopt.modules.moe.nxd.expert_mlps import ExpertMLPsV2
from nxd_memopt.modules.moe.nxd.routers import RouterBase
from nxd_memopt.modules.moe.nxd.token_shuffling import token_shuffle, token_unshuffle
from nxd_memopt.parallel_layers import mappings, parallel_state


class MoE(nn.Module):
    """Router and experts; ``[S, B, H]`` or ``[B, S, H]``, under sequence parallelism a shard of S.

    Args:
        router: chooses the experts.
        expert_mlps: the experts.
        shared_experts: ``SharedExperts``, or a module of ``(hidden [..., H], length of the sequence)``
            that sums the gradient of its input over the tensor-parallel ranks, as parallel layers do,
            and returns a partial sum over them.
        rmsnorm: norm of the input.
        sequence_parallel_enabled: the input is a sequence shard.
        sequence_dimension: dimension of the sequence, default 0.
        return_router_logits: return the router's logits too.
        return_expert_index: return the chosen experts too.
        token_shuffle_group_size: data-parallel ranks that exchange random tokens before the router, see
            ``token_shuffling``. Returned logits and experts are of the exchanged tokens.
        token_shuffle_seed: of the permutation, the same in every step; it is kept in
            ``shuffle_permutation``. Default another one in every step.
        tensor_model_parallel_group: ranks that share the layer; default the tensor-parallel group.
        init_tkg_module: False; it is for inference.
        tkg_config: None.

    Raises:
        ValueError: router and experts have other sizes, or sequence parallelism differs.
    """

    def __init__(
        self,
        router: RouterBase,
        expert_mlps: ExpertMLPsV2,
        shared_experts: nn.Module | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        init_tkg_module: bool = False,
        tkg_config: object = None,
    ) -> None:
        super().__init__()
        config = expert_mlps.routed_experts_mlp_config
        for name in ("num_experts", "top_k", "hidden_size"):
            ours, theirs = getattr(router, name), getattr(config, name)
            if ours != theirs:
                raise ValueError(
                    f"Inconsistent {name} across the router and expert_mlps: {ours} and {theirs}; build both with one"
                )
        dimension = 0 if sequence_dimension is None else sequence_dimension
        if router.sequence_parallel_enabled:
            if not sequence_parallel_enabled:
                raise ValueError(
                    "MoE layer must have SP enabled to run router in SP: pass sequence_parallel_enabled=True to both"
                )
            if router.sequence_dimension != dimension:
                raise ValueError(
                    f"Inconsistent sequence_dimension across MoE and router modules, {dimension} and "
                    f"{router.sequence_dimension}: pass one"
                )
        _refuse(init_tkg_module=init_tkg_module, tkg_config=tkg_config is not None)
        self.router = router
        self.expert_mlps = expert_mlps
        self.shared_experts = shared_experts
        self.rmsnorm = rmsnorm
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = dimension
        self.return_router_logits = return_router_logits
        self.return_expert_index = return_expert_index
        self.token_shuffle_group_size = token_shuffle_group_size
        self.token_shuffle_seed = token_shuffle_seed
        self.shuffle_permutation: Tensor | None = None
        if token_shuffle_group_size > 1:
            parallel_state.initialize_token_shuffle_group(token_shuffle_group_size)
        self.tensor_parallel_group = tensor_model_parallel_group

    def forward(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        is_speculative_decoding: bool = False,
        residual: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Return a tuple: the output, and the logits ``[T, E]`` and experts ``[T, k]`` if they are asked for."""
        _refuse(padding_mask=padding_mask is not None, residual=residual is not None)
        _refuse(is_speculative_decoding=is_speculative_decoding)
        if self.rmsnorm is not None:
            hidden_states = self.rmsnorm(hidden_states)
        permutation = None
        if self.token_shuffle_group_size > 1:
            hidden_states, permutation = token_shuffle(hidden_states, self.token_shuffle_seed)
            if self.token_shuffle_seed is not None:
                self.shuffle_permutation = permutation
        replicated = hidden_states
        if self.sequence_parallel_enabled and (self.shared_experts or not self.router.sequence_parallel_enabled):
            # For what does the same work on every rank, or sums its gradient itself.
            replicated = self._gather(hidden_states)
        logits, affinities, experts = self._route(hidden_states, replicated)
        layout: dict[str, Any] = {
            "sequence_parallel_enabled": self.sequence_parallel_enabled,
            "dim": self.sequence_dimension,
            "group": self.tensor_parallel_group,
        }
        full = for_all_experts(hidden_states, **layout)
        affinities = mappings.copy_to_tensor_model_parallel_region(affinities, self.tensor_parallel_group)
        length = full.size(self.sequence_dimension)
        output = self.expert_mlps(full.reshape(-1, full.size(-1)), affinities, experts, length).view(full.shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts(replicated, length)
        output = sum_over_experts(output, **layout)
        if permutation is not None:
            output = token_unshuffle(output, permutation)
        results = [output]
        if self.return_router_logits:
            results.append(logits)
        if self.return_expert_index:
            results.append(experts)
        return tuple(results)

    def _route(self, hidden_states: Tensor, replicated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's results for all tokens of the tensor-parallel ranks."""
        router = self.router
        if not router.sequence_parallel_enabled:
            return router(replicated)
        results = router(hidden_states)
        if router.training:
            return results
        # In evaluation the results are of this rank's tokens alone.
        shape = hidden_states.shape[:-1]
        parts = (each.view(*shape, -1) for each in results)
        logits, affinities, experts = (self._gather(part).flatten(0, -2) for part in parts)
        return logits, affinities, experts

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return the shards of all ranks, which do the same work on them: backward takes this rank's part."""
        return mappings.gather_from_sequence_parallel_region(
            tensor, self.sequence_dimension, False, self.tensor_parallel_group
        )


def _refuse(**is_given: bool) -> None:
    """Raise ``ValueError`` for the first argument that is given."""
    for name, given in is_given.items():
        if given:
            raise ValueError(f"{name} is not supported in the MoE layer: leave it out")
