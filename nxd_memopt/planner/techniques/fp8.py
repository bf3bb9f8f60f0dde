"""Says which linear layers are faster with float8 operands: facts that the library and the planner share."""

from __future__ import annotations

LEAST_PRODUCTS = 2**35
"""Multiplications of a forward matmul from which float8 pays.

Measured on an H200, forward and backward with casts against bf16, at 2,048 and at 8,192 tokens: with 2^35
multiplications (2,048 x 2,048 at 8,192 tokens, 4,096 x 4,096 at 2,048) tensorwise scales take 0.93 to 1.0 of the
time, with half of them 1.0 to 1.1, with four times as many 0.7 to 0.85 (docs/precision.md).
"""


def pays(tokens: int, inputs: int, outputs: int) -> bool:
    """Return whether a rank's matmul of ``[tokens, inputs]`` by ``[inputs, outputs]`` is faster in float8."""
    return tokens * inputs * outputs >= LEAST_PRODUCTS
