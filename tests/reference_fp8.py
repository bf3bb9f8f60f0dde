"""Float8 operands from the definition of the formats, without PyTorch's float8 dtypes: float64 values on their grid."""

from __future__ import annotations

import torch
from torch import Tensor

# bits after the leading 1, exponent of the smallest normal number, largest number
E4M3 = (3, -6, 448.0)
E5M2 = (2, -14, 57344.0)


def on_grid(x: Tensor, format: tuple[int, int, float]) -> Tensor:
    """Round float64 numbers to the nearest of a float8 format, ties to even, at most its largest one."""
    bits, smallest, largest = format
    exponent = torch.floor(torch.log2(x.abs().clamp(min=2.0 ** (smallest - bits - 2)))).clamp(min=smallest)
    step = 2.0 ** (exponent - bits)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def rounded(x: Tensor, format: tuple[int, int, float], largest: Tensor) -> Tensor:
    """Return the float64 values of ``x`` after a cast with the largest magnitudes ``largest``, which broadcast.

    The scaled numbers are computed in fp32, whose rounding decides between neighbours of the grid.
    """
    limit = torch.tensor(format[2], dtype=torch.float32)
    sizes = largest.float()
    scale = torch.where(sizes == 0, 1.0, sizes / limit)
    inverse = torch.where(sizes == 0, 1.0, limit / sizes)
    return on_grid((x.float() * inverse).double(), format) * scale.double()


class Rounding:
    """The casts of one recipe for ``[tokens, features]``: for a contraction over features, and over tokens."""

    def __init__(self, granularity: str, gradient: tuple[int, int, float]) -> None:
        self.is_rowwise = granularity == "rowwise"
        self.gradient = gradient

    def over_features(self, x: Tensor, format: tuple[int, int, float] = E4M3) -> Tensor:
        largest = x.abs().amax(1, keepdim=True) if self.is_rowwise else x.abs().max()
        return rounded(x, format, largest)

    def over_tokens(self, x: Tensor, format: tuple[int, int, float] = E4M3) -> Tensor:
        largest = x.abs().amax(0, keepdim=True) if self.is_rowwise else x.abs().max()
        return rounded(x, format, largest)

    def products(self, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``Y``, ``dX`` and ``dW`` of ``Y = X W^t`` in float64."""
        y = self.over_features(x) @ self.over_features(weight).t()
        # W^t contracts the rows of W: its rows are the columns of W
        dx = self.over_features(grad, self.gradient) @ self.over_tokens(weight)
        dw = self.over_tokens(grad, self.gradient).t() @ self.over_tokens(x)
        return y, dx, dw
