"""The router of a mixture of experts: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.autograd import without_autocast
from nxd_memopt.parallel_layers import mappings
from nxd_memopt.parallel_layers.initialization import InitMethod, initialize_sharded_, is_skipped
from nxd_memopt.parallel_layers.random import fork_if
from nxd_memopt.parallel_layers.utils import ShardedModule, mark_sequence_parallel, set_tensor_model_parallel_attributes

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
"""Dtypes by the names of ``moe_router_dtype``."""

SINKHORN_ITERATIONS = 30
SINKHORN_TOLERANCE = 1e-4
_SMALL = 1e-8  # keeps divisions finite for an expert that no token may choose
SMALLEST_SUM = 1e-20  # of sigmoid scores, as in DeepSeek-V3


@dataclass(frozen=True)
class Routing:
    """What the router decides for this rank's tokens.

    Attributes:
        logits: ``[..., E]``, in the dtype of the router.
        weights: ``[..., k]``, with gradients; fp32, or fp64 if the logits are.
        experts: ``[..., k]`` int64, the chosen experts.
    """

    logits: Tensor
    weights: Tensor
    experts: Tensor


class Router(ShardedModule):
    """Linear layer without bias, followed by the choice of k experts per token.

    Its weight is replicated. Under sequence parallelism it sees this rank's tokens only, so the
    gradient is a partial sum, and the weight is tagged for
    ``grads.allreduce_sequence_parallel_gradients``.

    Args:
        hidden_size: H.
        moe: options.
        sequence_parallel_enabled: the input is a sequence shard ``[s, B, H]``.
        dtype: dtype of the weight.
        device: device of the weight.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        *,
        sequence_parallel_enabled: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if moe.moe_router_dtype == "fp64" and backend.narrows_float64:
            raise ValueError(
                f"moe_router_dtype 'fp64' is computed in fp32 by NeuronCores (backend {backend.name}): use 'fp32'"
            )
        self.moe = moe
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.weight = nn.Parameter(torch.empty(moe.num_moe_experts, hidden_size, dtype=dtype, device=device))
        mark_sequence_parallel(self, sequence_parallel_enabled)
        bias = None
        if moe.has_expert_bias:
            bias = torch.zeros(moe.num_moe_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # ``to(torch.bfloat16)`` would round the bias to steps that are larger than its updates.
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def forward(self, hidden: Tensor) -> Routing:
        """Route ``hidden``, ``[..., H]``, which is not modified."""
        # No jitter in evaluation.
        eps = self.moe.moe_input_jitter_eps if self.training else None
        logits = self._logits(jittered(hidden, eps, is_shard=self.sequence_parallel_enabled))
        group = None
        if self.sequence_parallel_enabled:
            group = mappings.resolve_group(None)
        weights, experts = choose_experts(
            logits, self.moe, expert_bias=self.expert_bias, training=self.training, group=group
        )
        return Routing(logits, weights, experts)

    def _logits(self, hidden: Tensor) -> Tensor:
        name = self.moe.moe_router_dtype
        if name is None:
            return F.linear(hidden, self.weight)
        # Autocast would round the operands to 16 bits again.
        dtype = ROUTER_DTYPES[name]
        with without_autocast(hidden):
            return F.linear(hidden.to(dtype), self.weight.to(dtype))


def jittered(hidden: Tensor, eps: float | None, *, is_shard: bool) -> Tensor:
    """Return ``hidden`` times random numbers from ``[1 - eps, 1 + eps]``; ``hidden`` itself without an ``eps``."""
    if not eps:
        return hidden
    # Sequence shards differ between the ranks and draw from the rank's own stream; replicated
    # tokens need the same numbers on all ranks. Recompute restores both streams.
    with fork_if(is_shard):
        noise = torch.empty_like(hidden).uniform_(1 - eps, 1 + eps)
    return hidden * noise


@torch.no_grad()
def initialize_replicated_(weight: nn.Parameter, init_method: InitMethod, *, on_cpu: bool) -> None:
    """Draw a weight that is equal on all ranks, on the CPU in fp32 or on its device; meta parameters are skipped."""
    if is_skipped(weight):
        return
    # From the stream that the tensor-parallel ranks share.
    if on_cpu:
        set_tensor_model_parallel_attributes(weight, False, -1, full_shape=tuple(weight.shape))
        initialize_sharded_(weight, init_method)
    else:
        init_method(weight)


def wide(logits: Tensor) -> Tensor:
    """Return the logits in fp32, or in fp64 if they are fp64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def choose_experts(
    logits: Tensor,
    moe: MoEConfig,
    *,
    expert_bias: Tensor | None = None,
    training: bool = True,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights and indices of the chosen experts, both ``[..., k]``.

    Args:
        logits: ``[..., E]``.
        moe: options.
        expert_bias: ``[E]``, added to the scores for the choice, not to the weights.
        training: Sinkhorn balances the choice in training only.
        group: ranks that have the other tokens of the micro-batch, for Sinkhorn; ``logits`` is then
            a shard along its first dimension.
    """
    logits = wide(logits)
    top_k = moe.moe_router_topk
    if moe.moe_router_load_balancing_type == "sinkhorn":
        return _sinkhorn_choice(logits, top_k, training=training, group=group)
    if moe.moe_router_score_function == "sigmoid":
        return _sigmoid_choice(logits, top_k, expert_bias)
    if moe.moe_router_pre_softmax:
        weights, experts = torch.topk(logits.softmax(-1), top_k)
        return weights, experts
    chosen, experts = torch.topk(logits, top_k)
    return chosen.softmax(-1), experts


def _sigmoid_choice(logits: Tensor, top_k: int, expert_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    # Scores and logits have one order, and scores of large logits are equal in fp32.
    ranked = logits.detach()
    if expert_bias is not None:
        ranked = scores.detach() + expert_bias
    experts = torch.topk(ranked, top_k).indices
    weights = scores.gather(-1, experts)
    # One weight of 1 would not depend on the router.
    if top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return weights, experts


def _sinkhorn_choice(
    logits: Tensor, top_k: int, *, training: bool, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    # The weights are not the values of Sinkhorn's matrix, which has no gradient here.
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    if not training:
        experts = torch.topk(scores, top_k).indices
        return scores.gather(-1, experts), experts
    with torch.no_grad():
        # All tokens of the micro-batch are balanced together: [s, B, E] -> [S, B, E].
        full = backend.all_gather(logits.detach(), group)
        balanced = sinkhorn(full.reshape(-1, full.size(-1))).view_as(full)
        experts = torch.topk(backend.shard(balanced, 0, group), top_k).indices
    return scores.gather(-1, experts), experts


def sinkhorn(logits: Tensor) -> Tensor:
    """Return ``balance`` of ``logits`` with Megatron-LM's tolerance and neuronx-distributed's number of steps."""
    matrix, _ = balance(logits, SINKHORN_ITERATIONS, SINKHORN_TOLERANCE)
    return matrix


def balance(logits: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Scale the rows and columns of ``exp(logits)`` to equal sums: 1/N per token, 1/E per expert.

    The iteration ends as soon as the column factors change by at most ``tolerance`` on average.

    Args:
        logits: ``[N, E]``, without gradient.
        iterations: largest number of steps, at least 1.
        tolerance: 0 takes all steps.

    Returns:
        The matrix, and the mean change of the column factors in the last step, 0-dim.
    """
    tokens, num_experts = logits.shape
    # A factor of a row cancels in its row factor: the largest entry of each row is 1, so that
    # nothing overflows.
    cost = (logits - logits.amax(1, keepdim=True)).exp()
    columns = torch.ones_like(cost[0])
    has_converged = torch.zeros((), dtype=torch.bool, device=logits.device)
    rows = torch.ones_like(cost[:, 0])
    change = columns
    for _ in range(iterations):
        # Once converged both factors keep their values: no value is read on the host.
        new_rows = 1 / tokens / ((cost * columns).sum(1) + _SMALL)
        rows = torch.where(has_converged, rows, new_rows)
        new_columns = 1 / num_experts / ((cost * rows.unsqueeze(1)).sum(0) + _SMALL)
        change = (new_columns - columns).abs().mean()
        columns = torch.where(has_converged, columns, new_columns)
        has_converged = has_converged | (change <= tolerance)
    return columns * cost * rows.unsqueeze(1), change
