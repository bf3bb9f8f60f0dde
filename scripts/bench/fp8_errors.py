"""Error of each kind of linear layer in float8 on a pretrained model and text, against float64; runs on a CPU.

    python -m scripts.bench.fp8_errors --pretrained build/smollm2-135m-instruct --text README.md --tokens 1024

Prints a table for docs/precision.md: the ratio of signal to noise in dB of output, input gradient and weight gradient,
lowest and median over the decoder layers. The operands come from a forward and backward in bf16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from nxd_memopt.ops import fp8
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, Fp8Recipe, Operand

RECIPES = (Fp8Recipe("hybrid", "tensorwise"), Fp8Recipe("e4m3", "rowwise"))
PRODUCTS = ("Y", "dX", "dW")


def decibels(found: Tensor, expected: Tensor) -> float:
    """Return the ratio of signal to noise."""
    return 20 * torch.log10(expected.norm() / (found.double() - expected).norm()).item()


def exact(operand: Operand) -> Tensor:
    """Return the float64 values of a float8 operand."""
    return operand.data.double() * operand.scale.double()


def errors(x: Tensor, weight: Tensor, grad: Tensor, recipe: Fp8Recipe) -> dict[str, float]:
    """Return the decibels of the products of one layer, whose sums are in float64.

    Args:
        x: ``[tokens, inputs]``.
        weight: ``[outputs, inputs]``.
        grad: ``[tokens, outputs]``, gradient of the output.
        recipe: rounding.
    """
    dtypes = (FORWARD_DTYPE, FORWARD_DTYPE, recipe.gradient_dtype)
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    for operand, dtype in zip((x, weight, grad), dtypes, strict=True):
        sizes = fp8.magnitudes(operand, recipe)
        rows.append(exact(fp8.as_rows(operand, sizes, dtype)))
        # the padding of columns is for GPUs
        columns.append(exact(fp8.as_columns(operand, sizes, dtype))[:, : operand.size(0)])
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    return {
        "Y": decibels(rows[0] @ rows[1].t(), wide_x @ wide_weight.t()),
        "dX": decibels(rows[2] @ columns[1].t(), wide_grad @ wide_weight),
        "dW": decibels(columns[2] @ columns[0].t(), wide_grad.t() @ wide_x),
    }


def operands(model: nn.Module, ids: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return input, weight and output gradient of each linear layer of the decoder layers by name."""
    inputs: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name
    }

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(_: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            inputs[name] = arguments[0].detach()
            output.register_hook(lambda grad: grads.__setitem__(name, grad))

        return hook

    for name, module in linears.items():
        module.register_forward_hook(keep(name))
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: (inputs[name].flatten(0, -2), module.weight.detach(), grads[name].flatten(0, -2))
        for name, module in linears.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.pretrained, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.pretrained)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : args.tokens]
    found: dict[tuple[str, str, str], list[float]] = {}
    for name, tensors in operands(model, ids).items():
        for recipe in RECIPES:
            for product, value in errors(*tensors, recipe).items():
                found.setdefault((name.rpartition(".")[2], recipe.granularity, product), []).append(value)
    print(f"| layer | {' | '.join(f'{recipe.granularity}: {each}' for recipe in RECIPES for each in PRODUCTS)} |")
    print("|---" * (1 + len(RECIPES) * len(PRODUCTS)) + "|")
    for layer in dict.fromkeys(key[0] for key in found):
        values = [found[layer, recipe.granularity, each] for recipe in RECIPES for each in PRODUCTS]
        print(f"| {layer} | {' | '.join(f'{min(v):.1f}, {statistics.median(v):.1f}' for v in values)} |")


if __name__ == "__main__":
    main()
