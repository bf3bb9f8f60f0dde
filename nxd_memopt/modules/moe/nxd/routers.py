"""Routers with neuronx-distributed's names: they return logits, affinities of all experts, and the chosen experts."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.config import require_divisible
from nxd_memopt.modules.moe.router import SINKHORN_ITERATIONS, balance, jittered
from nxd_memopt.options import require_one_of
from nxd_memopt.parallel_layers import mappings
from nxd_memopt.parallel_layers.utils import ShardedModule, mark_sequence_parallel

Routed = tuple[Tensor, Tensor, Tensor]
"""Logits ``[T, E]``, affinities of all experts ``[T, E]``, and chosen experts ``[T, k]`` int64."""


class _RouterLinear(ShardedModule, nn.Linear):
    """A linear layer whose weight keeps its sequence-parallel tag when it is copied or replaced."""


class RouterBase(nn.Module):
    """Linear layer ``linear_router`` and the choice of k experts for each token.

    Under sequence parallelism the router sees this rank's tokens. In training its logits are
    gathered, and results are of all tokens; in evaluation, of this rank's tokens.

    Args:
        num_experts: E.
        top_k: k.
        hidden_size: H.
        act_fn: affinities are the ``"softmax"`` or the ``"sigmoid"`` of the logits, computed in fp64.
        sequence_parallel_enabled: the input is a sequence shard.
        sequence_dimension: dimension of the sequence, default 0.
        dtype: dtype of the weight and of the logits.
        device: device of the weight.
        bias: add a bias to the logits.
        tensor_model_parallel_group: ranks that have the other shards of the sequence.
        jitter_eps: in training, multiply a copy of the input by numbers from ``[1 - eps, 1 + eps]``.
        store_transposed_weights: must be False.
        apply_act_fn_over_topk: read by ``RouterTopK``: activation of the k chosen logits alone, other affinities
            are 0.

    Raises:
        ValueError: k is not in 1 to E, ``act_fn`` is unknown, ``jitter_eps`` is not in [0, 1), or
            ``store_transposed_weights`` is set.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
        bias: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
        apply_act_fn_over_topk: bool = False,
    ) -> None:
        super().__init__()
        if store_transposed_weights:
            raise ValueError(
                "store_transposed_weights=True keeps a second copy of the weight that training does not update: "
                "leave it out"
            )
        self.apply_act_fn_over_topk = apply_act_fn_over_topk
        if not 0 < top_k <= num_experts:
            raise ValueError(f"Invalid top_k={top_k} for num_experts={num_experts}: choose 1 to {num_experts}")
        require_one_of("act_fn", act_fn, ("softmax", "sigmoid"))
        if not 0 <= jitter_eps < 1:
            raise ValueError(f"jitter_eps {jitter_eps} must be in [0, 1): the input would change its sign")
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.act_fn = act_fn
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if sequence_parallel_enabled and sequence_dimension is None:
            sequence_dimension = 0
        self.sequence_dimension = sequence_dimension
        self.jitter_eps = jitter_eps
        self.tensor_parallel_group = tensor_model_parallel_group
        self.linear_router = _RouterLinear(hidden_size, num_experts, dtype=dtype, device=device, bias=bias)
        mark_sequence_parallel(self.linear_router, sequence_parallel_enabled)

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """Return ``[T, E]`` in the dtype of the weight; the input is not modified."""
        hidden = hidden_states.to(self.linear_router.weight.dtype)
        if self.training:
            hidden = jittered(hidden, self.jitter_eps, is_shard=self.sequence_parallel_enabled)
        logits = self.linear_router(hidden)
        if self.sequence_parallel_enabled and self.training:
            # All ranks continue with the same work on the logits: their gradients are equal.
            logits = mappings.gather_from_sequence_parallel_region(
                logits, self.sequence_dimension or 0, to_model_parallel=False, process_group=self.tensor_parallel_group
            )
        return logits.reshape(-1, self.num_experts)

    def apply_activation_fn(self, weights: Tensor) -> Tensor:
        """Return the affinities of ``weights``, ``[T, n]``, in fp64."""
        if self.act_fn == "sigmoid":
            return weights.to(torch.float64).sigmoid()
        return weights.softmax(dim=1, dtype=torch.float64)

    @abstractmethod
    def forward(self, hidden_states: Tensor) -> Routed: ...


class RouterTopK(RouterBase):
    """Chooses the k experts with the largest logits; use it with ``load_balancing_loss_func``.

    Args:
        num_experts: E.
        top_k: k.
        hidden_size: H.

    Other arguments as in ``RouterBase``.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
    ) -> None:
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            act_fn,
            sequence_parallel_enabled,
            sequence_dimension,
            dtype,
            device,
            bias,
            tensor_model_parallel_group,
            jitter_eps,
            store_transposed_weights,
            apply_act_fn_over_topk,
        )

    def forward(self, hidden_states: Tensor) -> Routed:
        """Route ``hidden_states``, ``[..., H]``; affinities have its dtype."""
        logits = self.get_router_logits(hidden_states)
        chosen, experts = torch.topk(logits, self.top_k)
        if self.apply_act_fn_over_topk:
            affinities = torch.zeros_like(logits, dtype=torch.float64)
            affinities = affinities.scatter(1, experts, self.apply_activation_fn(chosen))
        else:
            affinities = self.apply_activation_fn(logits)
        return logits, affinities.to(hidden_states.dtype), experts


class RouterSinkhorn(RouterBase):
    """Chooses one expert per token, in training from a matrix balanced by Sinkhorn's algorithm.

    Args:
        num_experts: E.
        top_k: 1.
        hidden_size: H.
        sinkhorn_iterations: steps of the algorithm, default 30.
        sinkhorn_tol: raise an error if the last step changes the column factors by this or more, on
            average; reads the device. None for no check.

    Other arguments as in ``RouterBase``.

    Raises:
        NotImplementedError: ``top_k`` is not 1.
        ValueError: ``sinkhorn_iterations`` is below 1.
    """

    DEFAULT_SINKHORN_ITERS = SINKHORN_ITERATIONS

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "sigmoid",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        sinkhorn_iterations: int | None = None,
        sinkhorn_tol: float | None = None,
    ) -> None:
        if top_k != 1:
            raise NotImplementedError(f"RouterSinkhorn only supports Top-1 routing, got top_k={top_k}")
        super().__init__(
            num_experts, top_k, hidden_size, act_fn, sequence_parallel_enabled, sequence_dimension, dtype, device
        )
        if sinkhorn_iterations is not None and sinkhorn_iterations < 1:
            raise ValueError(
                f"sinkhorn_iterations must be at least 1, got {sinkhorn_iterations}: none would balance nothing"
            )
        self.sinkhorn_iterations = self.DEFAULT_SINKHORN_ITERS if sinkhorn_iterations is None else sinkhorn_iterations
        self.sinkhorn_tol = sinkhorn_tol

    def forward(self, hidden_states: Tensor) -> Routed:
        """Route ``hidden_states``, ``[..., H]``; affinities have its dtype."""
        logits = self.get_router_logits(hidden_states)
        affinities = self.apply_activation_fn(logits).to(hidden_states.dtype)
        scores = logits.detach()
        if self.training:
            scores = self._sinkhorn(scores.to(torch.float32), self.sinkhorn_iterations, self.sinkhorn_tol)
        return logits, affinities, scores.argmax(dim=1, keepdim=True)

    @staticmethod
    def _sinkhorn(cost: Tensor, num_iters: int, tol: float | None = None) -> Tensor:
        """Scale rows and columns of ``exp(cost)``, ``[T, E]``, to sums of 1 / T and 1 / E.

        Raises:
            ValueError: the last step changes the column factors by ``tol`` or more, on average.
        """
        if num_iters == 0:
            return cost
        matrix, change = balance(cost, num_iters, 0)
        if tol is not None and change.item() >= tol:
            raise ValueError(
                f"Sinkhorn's algorithm changes its factors by {change.item():.3g} after {num_iters} steps, and "
                f"sinkhorn_tol is {tol:g}: raise sinkhorn_iterations or sinkhorn_tol"
            )
        return matrix


class GroupLimitedRouter(RouterBase):
    """Chooses k experts from the best groups of experts by sigmoid scores plus a bias (arXiv:2412.19437).

    The affinities are the scores without the bias, neither normalized nor scaled. The bias is the
    buffer ``e_score_correction_bias`` ``[E]``, zeros at first, which the caller updates.

    Args:
        num_experts: E.
        top_k: k.
        hidden_size: H.
        n_group: number of groups of consecutive experts.
        topk_group: groups of a token; the best are those with the largest sums of their two best experts.

    Other arguments as in ``RouterBase``.

    Raises:
        ValueError: the groups are not of equal size, or the groups of a token have less than k experts.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
    ) -> None:
        size = require_divisible("num_experts", num_experts, "n_group", n_group)
        if not 0 < topk_group <= n_group or topk_group * size < top_k or size < 2:
            raise ValueError(
                f"n_group {n_group} and topk_group {topk_group} leave {topk_group * size} experts in groups of {size} "
                f"for top_k {top_k}: choose at most {n_group} groups of 2 or more experts, together at least {top_k}"
            )
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            "sigmoid",
            sequence_parallel_enabled,
            sequence_dimension,
            dtype,
            device,
            tensor_model_parallel_group=tensor_model_parallel_group,
            jitter_eps=jitter_eps,
        )
        self.n_group = n_group
        self.topk_group = topk_group
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts, dtype=torch.float32, device=device))

    def forward(self, hidden_states: Tensor) -> Routed:
        """Route ``hidden_states``, ``[..., H]``; affinities have its dtype."""
        logits = self.get_router_logits(hidden_states)
        affinities = self.apply_activation_fn(logits).to(hidden_states.dtype)
        biased = affinities.detach() + self.e_score_correction_bias
        by_group = biased.unflatten(1, (self.n_group, -1))  # [T, groups, E / groups]
        best = torch.topk(torch.topk(by_group, 2).values.sum(-1), self.topk_group).indices
        is_chosen = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, True)
        # Not 0 for the other groups: biased scores may be negative.
        allowed = by_group.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf)
        return logits, affinities, torch.topk(allowed.flatten(1), self.top_k).indices
