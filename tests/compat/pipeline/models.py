"""A small foreign model for pipeline stages, and its training on one rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 13
HIDDEN = 4


class Passed(NamedTuple):
    """What a block returns."""

    hidden: Tensor
    trace: Tensor


class Block(nn.Module):
    """A layer with a buffer that state dicts leave out, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.dropout = dropout
        self.register_buffer("scale", torch.full((), 0.5, dtype=torch.float64), persistent=False)

    def forward(self, hidden: Tensor, mask: Tensor) -> Passed:
        """Return the next hidden states, and what they were."""
        update = torch.tanh(self.linear(hidden)) * self.scale * mask.unsqueeze(-1)
        return Passed(hidden + F.dropout(update, self.dropout, self.training), hidden.detach())


class Model(nn.Module):
    """Embedding, blocks and a tied head; the mean loss over labels that are not -100."""

    def __init__(self, blocks: int = 4, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, unused: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        hidden = self.embed(ids)
        shape = hidden.size(1)
        first = hidden
        for block in self.blocks:
            passed = block(hidden, mask)
            hidden = passed[0] + 0.01 * passed[1]
        # A value of the first stage that the last one needs, with its gradient; and a number that depends on shapes.
        logits = self.head(hidden + first / shape)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class DictModel(Model):
    """The same with a dict as output, and an output that the loss does not depend on."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)
        self.side = nn.Linear(HIDDEN, 1, dtype=torch.float64)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the logits, the loss and a score of the inputs."""
        side = self.side(self.embed(ids))
        loss, logits = super().forward(ids, mask, labels)
        return {"logits": logits, "loss": loss, "score": side * 2}


def batch(seed: int, *, rows: int = 4, length: int = 5) -> dict[str, Tensor]:
    """Return the inputs of a step."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    return {"ids": ids, "mask": torch.ones(rows, length, dtype=torch.float64), "labels": labels}


def accumulate(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Run forward and backward of the whole batch on one rank; return the loss."""
    output = model(**inputs)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    loss.backward()
    return loss.detach()
