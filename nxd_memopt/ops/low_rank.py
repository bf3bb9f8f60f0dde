"""Low-rank products that are added to the output of a matmul without a pass of their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.ops.parts import flat_rows


class LowRankTerm(NamedTuple):
    """``scale * a b``, a term of the output of a matmul.

    Args:
        a: ``[..., r]``.
        b: ``[r, n]``.
        scale: factor of the product.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    def rows(self, start: int, stop: int) -> LowRankTerm:
        """Return the term of a range of the first dimension."""
        return self._replace(a=self.a[start:stop])

    def write(self, out: Tensor, bias: Tensor | None = None) -> None:
        """Write the term, and the bias ``[n]``, to ``out``, ``[..., n]``."""
        # With beta=0 the first argument is not read: it has no values.
        first, beta = (self.b.new_empty(1, 1), 0) if bias is None else (bias, 1)
        # ``view`` raises where ``reshape`` would write to a copy.
        torch.addmm(first, flat_rows(self.a), self.b, beta=beta, alpha=self.scale, out=out.view(-1, out.size(-1)))

    def added_to(self, total: Tensor) -> Tensor:
        """Return ``total + scale * a b``, in the memory of ``total`` where views share memory."""
        if backend.views_share_memory:
            total.view(-1, total.size(-1)).addmm_(flat_rows(self.a), self.b, alpha=self.scale)
            return total
        return torch.addmm(flat_rows(total), flat_rows(self.a), self.b, alpha=self.scale).view(total.shape)

    def plus_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x weight^t + scale * a b``, ``[..., n]``, which is no view.

        The term is written first, and the large matmul adds to it: it reads its output while it multiplies. A
        thin matmul that adds would read and write the output in a pass of its own.
        """
        if not backend.views_share_memory:
            return self.added_to(F.linear(x, weight))
        total = x.new_empty((*x.shape[:-1], weight.size(0)))
        self.write(total)
        total.view(-1, total.size(-1)).addmm_(flat_rows(x), weight.t())
        return total


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``scale * a b``; the factor costs no pass of its own."""
    # With beta=0 the first argument is not read: it has no values.
    return torch.addmm(b.new_empty(1, 1), a, b, beta=0, alpha=scale)
