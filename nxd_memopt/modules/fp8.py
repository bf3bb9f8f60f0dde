"""Chooses the linear layers and experts of a model whose matmuls have float8 operands."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.lora import is_adapter, require_called_layers
from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.modules.moe.moe_layer import MoELayer
from nxd_memopt.ops.fp8 import ALIGNMENT, Fp8Recipe
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, SharedInput
from nxd_memopt.planner.sizes import fp8_layers
from nxd_memopt.planner.sizes.fp8_layers import experts_pay, pays, rounded_layers

_Linear = ColumnParallelLinear | RowParallelLinear


def use_fp8(
    model: ParallelCausalLM, recipe: Fp8Recipe, *, first_last_layers_bf16: int = 0, tokens: int | None = None
) -> list[str]:
    """Let the linear layers and experts of the decoder layers round their operands to float8 in training.

    Head, embedding, norms, routers, adapters and attention stay in the model's dtype, and experts if
    ``experts_in_bf16`` has a reason.

    Args:
        model: model in bf16, or on a CPU in any floating-point dtype.
        recipe: formats and scales.
        first_last_layers_bf16: number of decoder layers at each end that stay as they are.
        tokens: of a micro-batch; layers that are faster in bf16 then stay as they are. ``None`` rounds all.

    Returns:
        Names of the layers within the decoder layers, with the number of the decoder layer first.

    Raises:
        ValueError: no layer is left, a size is no multiple of 16, or a memory technique computes layers from
            their weights.
    """
    require_called_layers(model, "in bf16, which fp8 would not reach")
    names: list[str] = []
    rounded = _rounded_layers(model, first_last_layers_bf16)
    for number, layer in model.backbone.layers.named_children():
        for group in _computed_together(layer):
            for linear in group.values():
                linear.fp8 = None  # of an earlier call
            if number in rounded and (tokens is None or _pays(tokens, list(group.values()))):
                names += [f"{number}.{name}" for name in _round(group, recipe)]
        for name, module in _expert_layers(layer):
            experts = module.experts
            experts.fp8 = None
            if number not in rounded or _reason_for_bf16(module) is not None:
                continue
            # Of EP ranks each has k rows for each of its own tokens, if the routing is balanced.
            if tokens is None or experts_pay(tokens * module.moe.moe_router_topk, *_shape(experts)):
                experts.fp8 = recipe
                names.append(f"{number}.{name}")
    return names


def experts_in_bf16(model: ParallelCausalLM) -> str | None:
    """Return why no expert of the model can round, or None."""
    for layer in model.backbone.layers.children():
        for _, module in _expert_layers(layer):
            return _reason_for_bf16(module)
    return None


def float8_groups(model: ParallelCausalLM, *, first_last_layers_bf16: int = 0) -> list[list[nn.Parameter]]:
    """Return the weights that ``load_pretrained`` may store in float8: a list for each matmul, with one scale.

    Call ``use_fp8`` with equal ``first_last_layers_bf16`` and without ``tokens``.
    """
    return [
        [linear.weight for linear in group.values()]
        for layer in _rounded_layers(model, first_last_layers_bf16).values()
        for group in _computed_together(layer)
        if group
    ]


def _rounded_layers(model: ParallelCausalLM, first_last_layers_bf16: int) -> dict[str, nn.Module]:
    """Return the decoder layers by number, without those at both ends."""
    rounds = rounded_layers(first_last_layers_bf16, model.spec.num_layers)
    # a rank's stages of a pipeline have the layers' numbers in the model
    layers = model.backbone.layers.named_children()
    return {number: layer for number, layer in layers if rounds[int(number)]}


def _computed_together(layer: nn.Module) -> Iterator[dict[str, _Linear]]:
    """Yield the linear layers by name, those with one input and one matmul together."""
    linears = {
        name: module for name, module in layer.named_modules() if isinstance(module, _Linear) and not is_adapter(name)
    }
    for name, module in layer.named_modules():
        if isinstance(module, SharedInput):
            names = [f"{name}.{each}" for each in module.shared_input_layers]
            yield {each: linears.pop(each) for each in names if each in linears}
    for name, linear in linears.items():
        yield {name: linear}


def _pays(tokens: int, layers: list[_Linear]) -> bool:
    outputs = sum(layer.weight.size(0) for layer in layers)
    return bool(layers) and pays(tokens, layers[0].weight.size(1), outputs)


def _expert_layers(layer: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """Yield the name of the experts of each mixture of experts, and the mixture."""
    for name, module in layer.named_modules():
        if isinstance(module, MoELayer):
            yield f"{name}.experts", module


def _reason_for_bf16(module: MoELayer) -> str | None:
    experts = module.experts
    # Experts with biases, which never round, have weights of other names.
    shape = (0, 0, 0) if experts.has_biases else _shape(experts)
    return fp8_layers.experts_in_bf16(module.moe, shape, has_biases=experts.has_biases)


def _shape(experts: Experts) -> tuple[int, int, int]:
    """Return the experts of this rank, H, and the width of an expert here."""
    count, hidden, width = experts.down_proj.shape
    return count, hidden, width


def _round(layers: dict[str, _Linear], recipe: Fp8Recipe) -> list[str]:
    for name, layer in layers.items():
        if any(size % ALIGNMENT for size in layer.weight.shape):
            raise ValueError(
                f"fp8 needs sizes that are multiples of {ALIGNMENT}, the weight of {name} is "
                f"{list(layer.weight.shape)} on this rank: train in bf16, or with another tensor_model_parallel_size"
            )
        layer.fp8 = recipe
    return list(layers)
