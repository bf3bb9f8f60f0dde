"""The tensors that a decoder layer with adapters (LoRA) keeps for backward.

The model's own weights are frozen. A linear layer keeps its input for its adapter only, after an RMSNorm not even
that (``ops.norm.NormInput``), a norm does not keep its normalised input, and nothing before the first adapter of layer
0 has a gradient, so that its operations keep nothing. ``has_grad`` says of a tensor whether it has one; the inputs of
all other layers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.architectures.adapters import Adapters
from nxd_memopt.architectures.layers import fused_name
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.layer_tensors import (
    MODEL_TYPES_WITH_QK_NORM,
    Kernels,
    Part,
    Tensors,
    column_bytes,
    core_attention,
    dropout_bytes,
    head_norm_tensors,
    layer_kernels,
    layer_norm_tensors,
    layer_tensors,
    require_whole_layers,
    residual_bytes,
    rms_norm_tensors,
    rotated,
    with_magnitudes,
)
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes


def layer_parts(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, index: int = 0) -> Part:
    """Return the parts of decoder layer ``index``; arguments and errors as ``layer_tensors``."""
    if sizes.adapters is None:
        return layer_tensors(sizes, memory, kernels, index)
    require_whole_layers(memory, "lora_rank")
    layer = _AdaptedLayer(sizes, sizes.adapters, memory, layer_kernels(sizes, kernels, index))
    # The input of a later stage of a pipeline depends on the adapters of earlier ones.
    parts = layer.parts(has_grad=index > 0 or not sizes.has_embedding)
    return with_magnitudes(parts, sizes, memory, index)


@dataclass(frozen=True)
class _AdaptedLayer:
    """A decoder layer whose linear layers have adapters.

    Args:
        sizes: sizes of the rank.
        adapters: layers with an adapter.
        memory: techniques of the layer.
        kernels: operations and attention.
    """

    sizes: RankSizes
    adapters: Adapters
    memory: MemoryConfig
    kernels: Kernels

    def parts(self, *, has_grad: bool) -> Part:
        """Return the parts of the layer; ``has_grad`` of its input."""
        sizes = self.sizes
        layer_input = {"layer input": residual_bytes(sizes)}
        attention, attended = self._attention(has_grad=has_grad)
        into_mlp = has_grad or attended
        second = "mlp input"
        # GPT-NeoX's parallel branches have one input; else the MLP's depends on attention.
        if sizes.parallel_residual:
            into_mlp, second = has_grad, "layer input"
        of_mlp = self._plain_mlp
        if sizes.is_gated:
            of_mlp = self._gated_mlp
        mlp, expanded = of_mlp(has_grad=into_mlp)
        masks: Tensors = {}
        if sizes.hidden_dropout:
            branches = {"dropout of attention": attended, "dropout of the mlp": expanded}
            masks = {name: dropout_bytes(sizes, self.kernels) for name, exists in branches.items() if exists}
        parts = (
            self._norm("layer input", has_grad=has_grad),
            attention,
            self._norm(second, " (mlp)", has_grad=into_mlp),
            mlp,
        )
        return Part("layer", layer_input, masks, parts)

    def _source(self, module: str, norm: str, normed: Tensors, *, has_grad: bool) -> Tensors:
        """Return what the adapters of ``module`` keep of their input: it, or what its norm keeps for backward.

        Args:
            module: ``"attn"`` or ``"mlp"``.
            norm: name of the norm's input.
            normed: result of the norm.
            has_grad: whether the norm's input has a gradient.
        """
        # A copy of the norm's input in fp32 does not help. A checkpoint around one of both keeps the result.
        keeps_input = self.kernels.fused or self.sizes.element_bytes == FP32_BYTES
        is_separate = {"norm", module} & set(self.memory.recompute_modules or ())
        if not has_grad or not keeps_input or is_separate or self.adapters.has_dropout:
            return normed
        return self._norm(norm, has_grad=True).saves

    def _norm(self, name: str, suffix: str = "", *, has_grad: bool) -> Part:
        """Return what a norm with frozen weights saves."""
        if not has_grad:
            return Part("norm")
        if self.sizes.is_gated:
            return frozen_norm(rms_norm_tensors(self.sizes, self.kernels, name))
        return layer_norm_tensors(self.sizes, self.kernels, name, suffix)

    def _adapter(self, name: str, source: Tensors, *, has_grad: bool) -> Tensors:
        """Return what the adapter of layer ``name`` saves: its input, or a dropped copy, and the result of A."""
        if not self.adapters.on(name):
            return {}
        element = self.sizes.element_bytes
        # Under sequence parallelism this rank's tokens: A is applied to a shard, or its result is scattered.
        size = self.sizes.shard_tokens * self.adapters.rank * element
        if not self.adapters.has_dropout:
            # The parts of a fused layer have one A, which is applied once.
            return source | {f"{fused_name(self.sizes.model_type, name)} A": size}
        result = {f"{name} A": size}
        size = sum(source.values())
        result[f"{name} dropped input"] = size
        if has_grad:
            # PyTorch's CPU operators save factors, its CUDA kernel a boolean each.
            result[f"{name} dropout"] = size
            if self.kernels.fused:
                result[f"{name} dropout"] = size // element
        return result

    def _attention(self, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of attention, and whether its output has a gradient."""
        sizes = self.sizes
        names, output_name = ("query_key_value",) * 3, "dense"
        if sizes.is_gated:
            names, output_name = ("q_proj", "k_proj", "v_proj"), "o_proj"
        grads = tuple(has_grad or self.adapters.on(name) for name in names)
        has_core = any(grads)
        if not has_core and not self.adapters.on(output_name):
            return Part("attn"), False
        inputs = {"normed attention input": residual_bytes(sizes)}
        source = inputs
        if sizes.is_gated:
            source = self._source("attn", "layer input", inputs, has_grad=has_grad)
        context = {"attention": column_bytes(sizes, sizes.query)}
        saves: Tensors = {}
        for name in names:
            saves |= self._adapter(name, source, has_grad=has_grad)
        saves |= self._adapter(output_name, context, has_grad=has_core)
        if sizes.model_type in MODEL_TYPES_WITH_QK_NORM:
            heads = (("query", sizes.heads), ("key", sizes.kv_heads))
            for (name, number), exists in zip(heads, grads, strict=False):
                if exists:
                    saves |= _without_normalised(head_norm_tensors(sizes, self.kernels, name, number))
        return Part("attn", inputs, saves, (self._core(grads),)), True

    def _core(self, grads: tuple[bool, ...]) -> Part:
        """Return what core attention saves; ``grads`` of query, key and value."""
        if not any(grads):
            return Part("core_attn")
        shares = not self.sizes.is_gated
        tensors = rotated(self.sizes, self.memory, self.kernels, shares=shares)
        part = core_attention(self.sizes, self.kernels, *tensors)
        if self.kernels.attention != "math":
            return part
        # A matmul saves each operand for the gradient of the other one.
        query, key, value = grads
        scores = query or key
        is_operand = value and "attention weights" not in part.saves
        needed = {
            "query by heads": key,
            "key by heads": query,
            "value by heads": scores,
            "causal mask": scores,
            "softmax": scores or is_operand,
            "attention weights": value,
            "dropout of the weights": scores,
        }
        return Part("core_attn", part.inputs, {name: size for name, size in part.saves.items() if needed[name]})

    def _gated_mlp(self, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of a gated MLP, and whether its output has a gradient."""
        sizes = self.sizes
        gate, up = (has_grad or self.adapters.on(name) for name in ("gate_proj", "up_proj"))
        if not (gate or up or self.adapters.on("down_proj")):
            return Part("mlp"), False
        inputs = {"normed mlp input": residual_bytes(sizes)}
        result = {"mlp activation": column_bytes(sizes, sizes.width)}
        source = self._source("mlp", "mlp input", inputs, has_grad=has_grad)
        saves: Tensors = {}
        for name in ("gate_proj", "up_proj"):
            saves |= self._adapter(name, source, has_grad=has_grad)
        has_act = gate or up
        # The kernel of the gated activation with its projection recomputes the result. It does not run with an
        # adapter on the projection that has dropout.
        drops = self.adapters.has_dropout
        if self.kernels.fused and not (drops and self.adapters.on("down_proj")):
            saves |= self._adapter("down_proj", {}, has_grad=True)
            return Part("mlp", inputs, saves, (self._fused_act(),)), True
        act = Part("mlp_act")
        if has_act and self.kernels.fused:
            act = self._fused_act()
        elif has_act:
            act = self._plain_act(gate=gate, up=up)
        saves |= self._adapter("down_proj", result, has_grad=has_act)
        return Part("mlp", inputs, saves, (act,)), True

    def _fused_act(self) -> Part:
        """Return what the kernel of the gated activation saves: gate and up.

        Both are views of one storage. An adapter with dropout adds its output to a copy of its projection's, and
        a projection without an adapter keeps all of the storage.
        """
        width = column_bytes(self.sizes, self.sizes.width)
        both: Tensors = {}
        for name in ("gate_proj", "up_proj"):
            if self.adapters.has_dropout and self.adapters.on(name):
                both[f"adapted {name}"] = width
            else:
                both["gate, up"] = 2 * width
        return Part("mlp_act", both, both)

    def _plain_act(self, *, gate: bool, up: bool) -> Part:
        """Return what plain operations save of the gated activation; ``gate`` and ``up`` have gradients."""
        width = column_bytes(self.sizes, self.sizes.width)
        is_relu = self.sizes.hidden_act == "relu"
        kept = {
            # ReLU's gradient needs its result, not its input.
            "gate": gate and not is_relu,
            "up": gate,
            "activated gate": up or (gate and is_relu),
        }
        return Part("mlp_act", {"gate": width, "up": width}, {name: width for name, is_kept in kept.items() if is_kept})

    def _plain_mlp(self, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of GPT-NeoX's MLP, and whether its output has a gradient."""
        sizes = self.sizes
        has_act = has_grad or self.adapters.on("dense_h_to_4h")
        if not has_act and not self.adapters.on("dense_4h_to_h"):
            return Part("mlp"), False
        inputs = {"normed mlp input": residual_bytes(sizes)}
        width = column_bytes(sizes, sizes.width)
        result = {"mlp activation": width}
        expanded = {"expanded": width}
        saves = self._adapter("dense_h_to_4h", inputs, has_grad=has_grad)
        act = Part("mlp_act")
        if has_act:
            act = Part("mlp_act", expanded, expanded)
            # ReLU's gradient needs its result, not its input.
            if sizes.hidden_act == "relu":
                act = Part("mlp_act", expanded, result)
        saves |= self._adapter("dense_4h_to_h", result, has_grad=has_act)
        return Part("mlp", inputs, saves, (act,)), True


def frozen_norm(part: Part) -> Part:
    """Return what a norm saves whose weight has no gradient."""
    return Part(part.name, part.inputs, _without_normalised(part.saves))


def _without_normalised(tensors: Tensors) -> Tensors:
    return {name: size for name, size in tensors.items() if not name.endswith(" normalised")}


def rotates_with_grad(sizes: RankSizes, memory: MemoryConfig) -> bool:
    """Return whether a layer keeps the tables of RoPE for backward; the only one may have no such gradient."""
    is_first_alone = sizes.num_layers == 1 and sizes.has_embedding
    if sizes.adapters is None or not is_first_alone or memory.recompute_granularity == "full":
        return True
    return sizes.adapters.on("q_proj", "k_proj", "query_key_value")
