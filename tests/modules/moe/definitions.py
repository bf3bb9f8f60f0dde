"""Mixture of experts in float64 from its definitions, one token at a time; calls nothing of the library."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Weights:
    """Full weights: router [E, H], gate [E, F, H], up [E, F, H], down [E, H, F]; expert_bias [E] or None."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    expert_bias: Tensor | None = None

    @staticmethod
    def random(experts: int, hidden: int, width: int, *, seed: int = 3) -> Weights:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5

        return Weights(
            draw(experts, hidden),
            draw(experts, width, hidden),
            draw(experts, width, hidden),
            draw(experts, hidden, width),
        )

    def leaves(self) -> Weights:
        def leaf(tensor: Tensor) -> Tensor:
            return tensor.clone().requires_grad_()

        return Weights(leaf(self.router), leaf(self.gate), leaf(self.up), leaf(self.down), self.expert_bias)


def highest(scores: Tensor, k: int) -> list[int]:
    """The k highest of E numbers, as indices, by sorting."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e].item(), e))[:k]


def choose(logits: Tensor, k: int, rule: str, bias: Tensor | None = None) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Chosen experts of each token and their weights; ``rule`` is post, pre, sigmoid."""
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    for row in logits:
        if rule == "post":
            mine = highest(row, k)
            total = sum(row[e].exp() for e in mine)
            weights.append([row[e].exp() / total for e in mine])
        elif rule == "pre":
            mine = highest(row, k)
            total = row.exp().sum()
            weights.append([row[e].exp() / total for e in mine])
        else:
            scores = 1 / (1 + (-row).exp())
            mine = highest(scores if bias is None else scores + bias, k)
            total = sum(scores[e] for e in mine) if k > 1 else 1.0
            weights.append([scores[e] / total for e in mine])
        experts.append(mine)
    return experts, weights


def sinkhorn_matrix(logits: Tensor, *, steps: int = 30, tolerance: float = 1e-4) -> Tensor:
    """Scale rows and columns of exp(logits) in turns until the column factors stay."""
    cost = logits.detach().double().exp()
    tokens, experts = cost.shape
    columns = torch.ones(experts, dtype=torch.float64)
    rows = torch.ones(tokens, dtype=torch.float64)
    for _ in range(steps):
        rows = torch.stack([(1 / tokens) / (row * columns).sum() for row in cost])
        new = torch.stack([(1 / experts) / (column * rows).sum() for column in cost.t()])
        change = (new - columns).abs().mean()
        columns = new
        if change <= tolerance:
            break
    return rows.unsqueeze(1) * cost * columns


def choose_by_sinkhorn(logits: Tensor, k: int) -> tuple[list[list[int]], list[list[Tensor]]]:
    matrix = sinkhorn_matrix(logits)
    experts = [highest(row, k) for row in matrix]
    weights = []
    for row, mine in zip(logits, experts, strict=True):
        values = 1 / (1 + (-row).exp()) if k == 1 else row.exp() / row.exp().sum()
        weights.append([values[e] for e in mine])
    return experts, weights


def kept_choices(
    experts: list[list[int]], weights: list[list[Tensor]], num_experts: int, factor: float, policy: str
) -> set[tuple[int, int]]:
    """(token, expert) pairs that fit: each expert's queue is filled by weight or by position, then cut."""
    tokens, k = len(experts), len(experts[0])
    capacity = math.ceil(tokens * k / num_experts * factor)
    kept: set[tuple[int, int]] = set()
    for expert in range(num_experts):
        queue = []
        for token in range(tokens):
            for choice in range(k):
                if experts[token][choice] == expert:
                    weight = weights[token][choice].item()
                    queue.append(((-weight, token) if policy == "probs" else (token,), token))
        kept |= {(token, expert) for _, token in sorted(queue)[:capacity]}
    return kept


@dataclass
class Options:
    """What the reference computes."""

    k: int = 2
    rule: str = "post"  # post, pre, sigmoid or sinkhorn
    factor: float | None = None
    policy: str = "probs"
    loss: str = "none"  # aux, seq, global
    coeff: float = 0.0
    z_coeff: float = 0.0


@dataclass
class Result:
    """Outputs and decisions for one micro-batch, tokens in the order of position and then row."""

    outputs: Tensor  # [S, B, H]
    logits: Tensor  # [S, B, E]
    experts: list[list[int]] = field(default_factory=list)


def moe_forward(x: Tensor, w: Weights, options: Options, noise: Tensor | None = None) -> Result:
    """The layer for ``x`` [S, B, H]: every kept choice of every token, one by one."""
    flat = x.flatten(0, 1)
    routed = flat if noise is None else flat * noise.flatten(0, 1)
    logits = torch.stack([w.router @ row for row in routed])
    if options.rule == "sinkhorn":
        experts, weights = choose_by_sinkhorn(logits, options.k)
    else:
        experts, weights = choose(logits, options.k, options.rule, w.expert_bias)
    num_experts = w.router.size(0)
    kept = {(token, expert) for token, mine in enumerate(experts) for expert in mine}
    if options.factor is not None:
        kept = kept_choices(experts, weights, num_experts, options.factor, options.policy)
    outputs = []
    for token, row in enumerate(flat):
        total = torch.zeros_like(row)
        for expert, weight in zip(experts[token], weights[token], strict=True):
            if (token, expert) in kept:
                gate = w.gate[expert] @ row
                total = total + weight * (w.down[expert] @ (gate / (1 + (-gate).exp()) * (w.up[expert] @ row)))
        outputs.append(total)
    shape = (*x.shape[:2], -1)
    return Result(torch.stack(outputs).view(x.shape), logits.view(shape), experts)


def scores_of(logits: Tensor, rule: str) -> Tensor:
    if rule == "sigmoid":
        values = 1 / (1 + (-logits).exp())
        return values / values.sum(-1, keepdim=True)
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def fractions_and_means(logits: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """f_e and P_e of the tokens ``logits`` [N, E]."""
    scores = scores_of(logits, options.rule)
    fractions = torch.zeros(logits.size(-1), dtype=torch.float64)
    for row in scores:
        for expert in highest(row.detach(), options.k):
            fractions[expert] += 1 / len(scores)
    return fractions, scores.mean(0)


def losses(batches: list[Tensor], options: Options) -> Tensor:
    """Mean over micro-batches of balancing loss and z-loss; ``batches`` are logits [S, B, E]."""
    num_experts = batches[0].size(-1)
    factor = options.coeff * num_experts / options.k
    total = torch.zeros((), dtype=torch.float64)
    everything = torch.cat([logits.flatten(0, 1) for logits in batches])
    for logits in batches:
        tokens = logits.flatten(0, 1)
        if options.loss == "aux":
            fractions, means = fractions_and_means(tokens, options)
            total = total + factor * (fractions * means).sum()
        if options.loss == "seq":
            for row in range(logits.size(1)):
                fractions, means = fractions_and_means(logits[:, row], options)
                total = total + factor * (fractions * means).sum() / logits.size(1)
        total = total + options.z_coeff * (tokens.exp().sum(-1).log() ** 2).mean()
    total = total / len(batches)
    if options.loss == "global":
        fractions, means = fractions_and_means(everything, options)
        total = total + factor * (fractions * means).sum()
    return total
