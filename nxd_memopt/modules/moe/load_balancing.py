"""Load-balancing losses and the z-loss, from sums over the tokens of a micro-batch.

Definitions, with E experts, k choices per token, f_e the choices of expert e divided by the number
of tokens, and P_e the mean score of expert e (docs/moe.md):

- ``aux_loss``, ``seq_aux_loss``, ``global_aux_loss``: ``coeff * E / k * sum_e f_e P_e`` over the
  tokens of one micro-batch of a data-parallel rank, of each sequence (then averaged), or of the
  micro-batches of all data-parallel ranks and of the full step. One loss per layer; they are added.
- ``hf_aux_loss``: ``coeff * E * sum_e f_e P_e`` over the tokens of all layers together.
- z-loss: ``coeff * mean(logsumexp(logits)^2)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.modules.moe.router import SMALLEST_SUM, Router, Routing, wide
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers import mappings, parallel_state


@dataclass(frozen=True)
class TokenSums:
    """Sums over the tokens of each sequence of a micro-batch, equal on all tensor-parallel ranks.

    Only tokens count that the token mask keeps. All are fp32, or fp64 if the logits are. Without a
    loss of the routers none has a gradient.

    Attributes:
        tokens: ``[B]``, number of tokens.
        z: ``[B]``, squared log-sum-exp of the logits, with gradient.
        scores: ``[B, E]``, scores of the experts, with gradient.
        scored: ``[B, E]``, how often an expert is among the k highest scores. It differs from
            ``chosen`` if the router adds a bias to the scores.
        chosen: ``[B, E]``, how often the router has chosen an expert, before any drop.
    """

    tokens: Tensor
    z: Tensor
    scores: Tensor
    scored: Tensor
    chosen: Tensor


def token_sums(routing: Routing, moe: MoEConfig, mask: Tensor | None, *, sequence_first: bool) -> TokenSums:
    """Return the sums over the sequence, of all tensor-parallel ranks under sequence parallelism.

    Args:
        routing: the router's decisions for ``[B, S]`` tokens, or a sequence shard ``[s, B]``.
        moe: options.
        mask: in the layout of the tokens, 0 for tokens that do not count; None if all do.
        sequence_first: the layout is ``[s, B]``, and other ranks have the rest of the sequence.
    """
    logits = wide(routing.logits)
    if not moe.has_router_loss:
        # Otherwise backward would compute gradients of zero, in 45 operations and views a layer.
        logits = logits.detach()
    weights = torch.ones_like(logits[..., 0])
    if mask is not None:
        weights = (mask != 0).to(logits.dtype)
    scores, best = _balancing_scores(logits, moe)
    columns = [
        weights.unsqueeze(-1),
        (logits.logsumexp(-1).square() * weights).unsqueeze(-1),
        scores * weights.unsqueeze(-1),
        _choices(best, logits) * weights.unsqueeze(-1),
        _choices(routing.experts, logits) * weights.unsqueeze(-1),
    ]
    # One reduction for all sums: forward all-reduce, backward identity. Each rank computes the
    # losses from the same sums, so the gradient of its own term is the gradient of the loss.
    sums = torch.cat(columns, dim=-1).sum(0 if sequence_first else 1)  # [B, 2 + 3 E]
    if sequence_first:
        sums = mappings.functional_reduce_from_tensor_model_parallel_region(sums)
    num_experts = logits.size(-1)
    tokens, z, *rest = split_sizes(sums.t(), [1, 1, num_experts, num_experts, num_experts])
    return TokenSums(tokens[0], z[0], *(part.t() for part in rest))


def _balancing_scores(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """Return the scores of all experts, which add up to 1, and the k best experts by score."""
    if moe.moe_router_score_function == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + SMALLEST_SUM)
    else:
        scores = logits.softmax(-1)
    return scores, torch.topk(logits.detach(), moe.moe_router_topk).indices


def _choices(experts: Tensor, logits: Tensor) -> Tensor:
    """Return 1 for each chosen expert and 0 for all others, in the shape of ``logits``."""
    return torch.zeros_like(logits).scatter_(-1, experts, 1.0)


def balancing_loss(
    sums: TokenSums, moe: MoEConfig, step_means: Tensor | None = None, *, training: bool = True
) -> Tensor:
    """Return the layer's balancing loss times its coefficient, 0-dim; 0 for types without one.

    Args:
        sums: of the micro-batch.
        moe: options.
        step_means: ``[E + 1]``, for ``global_aux_loss``: f_e over all micro-batches of the step, and
            their mean number of tokens; None takes the values of this forward of all data-parallel ranks.
        training: otherwise the loss is a figure of this rank, whose evaluation may have more batches than
            that of other ranks.
    """
    kind = moe.moe_router_load_balancing_type
    if not moe.has_aux_loss or kind == "hf_aux_loss":
        return sums.tokens.new_zeros(())
    factor = moe.moe_aux_loss_coeff * moe.num_moe_experts / moe.moe_router_topk
    # The mean over sequences: a micro-batch of B sequences has the loss of B micro-batches of one.
    if kind == "seq_aux_loss":
        # A sequence without tokens has neither fractions nor a loss, and is left out of the mean.
        tokens = sums.tokens.clamp(min=1).unsqueeze(1)
        products = (sums.scored / tokens * (sums.scores / tokens)).sum(1)
        return factor * products.sum() / (sums.tokens > 0).sum().clamp(min=1)
    if kind == "global_aux_loss":
        means = step_means
        if means is None:
            means = _global_means(sums, parallel_state.get_data_parallel_group() if training else None)
        # This micro-batch's term of P_e: the mean of the terms, which the average of gradients over
        # ranks and micro-batches is, is the sum of scores divided by the sum of tokens.
        means = means.to(sums.scores.dtype)
        fractions, scores = means[:-1], sums.scores.sum(0) / means[-1]
    else:
        tokens = sums.tokens.sum().clamp(min=1)
        fractions = sums.scored.sum(0) / tokens
        scores = sums.scores.sum(0) / tokens
    return factor * (fractions * scores).sum()


@torch.no_grad()
def _global_means(sums: TokenSums, group: ProcessGroup | None) -> Tensor:
    """Return f_e over the micro-batches of the ranks of ``group``, and their mean number of tokens, ``[E + 1]``."""
    local = torch.cat([sums.scored.sum(0), sums.tokens.sum().unsqueeze(0)])
    return means_of_totals(backend.all_reduce(local, group), backend.group_size(group))


def means_of_totals(totals: Tensor, micro_batches: int) -> Tensor:
    """Return f_e and the mean number of tokens, ``[..., E + 1]``, from numbers of choices and tokens."""
    tokens = totals[..., -1:].clamp(min=1)
    return torch.cat([totals[..., :-1] / tokens, tokens / micro_batches], dim=-1)


def z_loss(sums: TokenSums, moe: MoEConfig) -> Tensor:
    """Return the z-loss times its coefficient, 0-dim."""
    if not moe.moe_z_loss_coeff:
        return sums.tokens.new_zeros(())
    return moe.moe_z_loss_coeff * sums.z.sum() / sums.tokens.sum().clamp(min=1)


# One layer's row of results, which decoder layers pass on next to the hidden states


@dataclass(frozen=True)
class RouterStatistics:
    """Results of the routers of all MoE layers, ``rows`` is ``[layers, 3 + 2 E]``.

    They are outputs of the layers, not attributes: a recomputed layer computes its row twice and
    returns it once.
    """

    rows: Tensor

    @property
    def balancing_losses(self) -> Tensor:
        """``[layers]``, with coefficient and, unless it is 0, gradient; 0 for ``hf_aux_loss``."""
        return self.rows[:, 0]

    @property
    def z_losses(self) -> Tensor:
        """``[layers]``, with coefficient and, unless it is 0, gradient."""
        return self.rows[:, 1]

    @property
    def tokens_per_expert(self) -> Tensor:
        """``[layers, E]``, tokens of the micro-batch that chose each expert, before any drop."""
        return self.rows[:, 3 + self._num_experts :].detach()

    @property
    def tokens(self) -> Tensor:
        """``[layers]``, tokens of the micro-batch."""
        return self.rows[:, 2].detach()

    @property
    def _num_experts(self) -> int:
        return (self.rows.size(1) - 3) // 2

    def loss(self, moe: MoEConfig) -> Tensor:
        """Return the sum of all losses of the routers, 0-dim, with gradient if there is one."""
        total = self.balancing_losses.sum() + self.z_losses.sum()
        if moe.moe_router_load_balancing_type == "hf_aux_loss" and moe.has_aux_loss:
            total = total + moe.moe_aux_loss_coeff * self.hf_loss()
        return total

    def hf_loss(self) -> Tensor:
        """Return transformers' ``load_balancing_loss_func`` over the tokens of all layers.

        It has a gradient if the router has a loss (``MoEConfig.has_router_loss``).
        """
        tokens = self.tokens.sum().clamp(min=1)
        scores = self.rows[:, 3 : 3 + self._num_experts].sum(0)
        fractions = self.tokens_per_expert.sum(0) / tokens
        return self._num_experts * (fractions * (scores / tokens)).sum()


def empty_rows(num_experts: int, device: torch.device) -> Tensor:
    """Return rows of no layer, ``[0, 3 + 2 E]`` fp32."""
    return torch.zeros(0, 3 + 2 * num_experts, dtype=torch.float32, device=device)


def with_row(
    rows: Tensor, sums: TokenSums, moe: MoEConfig, step_means: Tensor | None, *, training: bool = True
) -> Tensor:
    """Return ``rows`` and one more, of the layer with ``sums``; arguments as ``balancing_loss``."""
    balancing = balancing_loss(sums, moe, step_means, training=training)
    losses = torch.stack([balancing, z_loss(sums, moe), sums.tokens.sum()])
    row = torch.cat([losses, sums.scores.sum(0), sums.chosen.sum(0)])
    return torch.cat([rows.to(row.dtype), row.unsqueeze(0)])


# Balancing by a bias, without a loss


@torch.no_grad()
def update_expert_bias(routers: Sequence[Router], tokens_per_expert: Tensor) -> None:
    """Raise the bias of experts below the mean load by the update rate, and lower the bias of the others.

    arXiv:2408.15664, algorithm 1. Every data-parallel rank calls, once per optimizer step.

    Args:
        routers: the routers of all MoE layers, in the order of ``RouterStatistics``.
        tokens_per_expert: ``[layers, E]``, ``RouterStatistics.tokens_per_expert`` of this rank's
            micro-batches of the step, added up.

    Raises:
        ValueError: the shape of the counts is not ``[routers, experts]``.
    """
    move_expert_bias(routers, backend.all_reduce(tokens_per_expert, parallel_state.get_data_parallel_group()))


@torch.no_grad()
def move_expert_bias(routers: Sequence[Router], tokens_per_expert: Tensor) -> None:
    """Run ``update_expert_bias`` with the counts of all data-parallel ranks."""
    counts = tokens_per_expert
    if routers and counts.shape != (len(routers), routers[0].moe.num_moe_experts):
        raise ValueError(
            f"tokens_per_expert has shape {list(counts.shape)}, and {len(routers)} routers have "
            f"{routers[0].moe.num_moe_experts} experts: must be [routers, experts]"
        )
    directions = (counts.mean(-1, keepdim=True) - counts).sign()
    for router, direction in zip(routers, directions, strict=True):
        assert router.expert_bias is not None, "moe_router_bias_update_rate is 0"
        router.expert_bias += router.moe.moe_router_bias_update_rate * direction
