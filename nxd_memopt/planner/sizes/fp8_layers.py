"""Says which linear layers and experts are faster with float8 operands: facts of library and planner."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.architectures.experts import MOST_EXPERTS
from nxd_memopt.moe_config import MoEConfig

LEAST_PRODUCTS = 2**35
"""Multiplications of a forward matmul from which float8 pays.

Measured on an H200, forward and backward with casts against bf16, at 2,048 and at 8,192 tokens: with 2^35
multiplications (2,048 x 2,048 at 8,192 tokens, 4,096 x 4,096 at 2,048) tensorwise scales take 0.93 to 1.0 of the
time, with half of them 1.0 to 1.1, with four times as many 0.7 to 0.85 (docs/precision.md).
"""
LEAST_EXPERT_ROWS = 600
"""Rows of an expert for which float8 saves the time in which its weight is measured and cast, three reads of it."""
CASTS_OF_ROWS = (500, 300)
"""Inputs and outputs of an expert for which float8 saves the time in which its rows are measured and cast.

Measured on an H200, forward and backward against bf16, tensorwise: Mixtral's 4,096 x 14,336 took 0.90 of the time with
1,024 rows for each expert and 1.09 with 512, Qwen3's 2,048 x 768 0.97 with 2,048 and 1.29 with 512, Qwen1.5-MoE's
2,048 x 1,408 1.13 with 546.
"""
ALIGNMENT = 16
"""Multiple of all dimensions of a float8 matmul but the rows of its result."""
LEAST_CAPABILITY = 9.0
"""Compute capability from which GPUs multiply in float8."""


@dataclass(frozen=True)
class Fp8Layers:
    """Decoder layers whose linear layers round their operands where that pays.

    Args:
        layers: for each decoder layer whether its linear layers may.
        is_rowwise: each row of an operand has a scale, instead of each tensor.
        least_products: see ``LEAST_PRODUCTS``; 0 rounds all.
        stores_weights: the weights of these layers are stored in float8.
    """

    layers: tuple[bool, ...]
    is_rowwise: bool = False
    least_products: int = LEAST_PRODUCTS
    stores_weights: bool = False


def rounded_layers(first_last_layers_bf16: int, num_layers: int) -> tuple[bool, ...]:
    """Return for each decoder layer whether it may round.

    Args:
        first_last_layers_bf16: layers at each end that do not.
        num_layers: all of them.

    Raises:
        ValueError: no layer is left.
    """
    ends = first_last_layers_bf16
    if 2 * ends >= num_layers:
        raise ValueError(
            f"first_last_layers_bf16={ends} leaves none of {num_layers} decoder layers: use less than "
            f"{(num_layers + 1) // 2}"
        )
    return tuple(ends <= number < num_layers - ends for number in range(num_layers))


def pays(tokens: int, inputs: int, outputs: int) -> bool:
    """Return whether a rank's matmul of ``[tokens, inputs]`` by ``[inputs, outputs]`` is faster in float8."""
    return tokens * inputs * outputs >= LEAST_PRODUCTS


def experts_pay(rows: int, experts: int, inputs: int, outputs: int) -> bool:
    """Return whether a rank's experts are faster in float8.

    Args:
        rows: of all its experts.
        experts: of this rank.
        inputs: H.
        outputs: width of an expert on this rank.
    """
    of_inputs, of_outputs = CASTS_OF_ROWS
    return rows * (1 - of_inputs / inputs - of_outputs / outputs) >= experts * LEAST_EXPERT_ROWS


def experts_in_bf16(options: MoEConfig, shape: tuple[int, int, int], *, has_biases: bool) -> str | None:
    """Return why the experts of a layer never round, or None.

    Args:
        options: of the layer.
        shape: experts of a rank, H, and the width of an expert on it.
        has_biases: the experts are GPT-NeoX's.
    """
    experts, *sizes = shape
    if has_biases:
        return "their matmuls have biases"
    if options.moe_expert_block_size is not None:
        return "moe_expert_block_size computes them in blocks"
    if options.moe_pad_expert_input_to_capacity:
        return "moe_pad_expert_input_to_capacity pads their rows"
    if experts > MOST_EXPERTS:
        return f"a rank has more than {MOST_EXPERTS}"
    if any(size % ALIGNMENT for size in sizes):
        return f"their sizes on a rank, {sizes}, are no multiples of {ALIGNMENT}"
    return None
