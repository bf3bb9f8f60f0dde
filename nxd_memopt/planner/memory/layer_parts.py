"""The parts of a decoder layer: what each keeps for backward, with trained weights or with adapters (LoRA).

With adapters the model's own weights are frozen. A linear layer keeps its input for its adapter only, after an RMSNorm
not even that (``ops.norm.NormInput``), a norm does not keep its normalised input, and nothing before the first adapter
of layer 0 has a gradient, so that its operations keep nothing. ``has_grad`` says of a tensor whether it has one; the
inputs of all other layers do, as do all tensors without adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxd_memopt.architectures.layers import fused_name
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.expert_tensors import expert_tensors
from nxd_memopt.planner.memory.layer_tensors import (
    MODEL_TYPES_WITH_QK_NORM,
    ROUTER_STATISTICS,
    Kernels,
    Part,
    Tensors,
    core_attention,
    dropout_bytes,
    fp8_magnitudes,
    head_norm_tensors,
    layer_kernels,
    layer_norm_tensors,
    merges_branches,
    merges_inputs,
    norm_tensors,
    rotated,
    saved_input,
)
from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes
from nxd_memopt.planner.techniques.tiling import require_head_groups


def layer_parts(sizes: RankSizes, memory: MemoryConfig, kernels: Kernels, index: int = 0) -> Part:
    """Return the parts of decoder layer ``index`` under the techniques of ``layer_runs``.

    With experts, a layer has one row of statistics more as its input than the layer before it. A layer with an
    attention window runs tiles instead of a kernel that has no windows.

    Raises:
        ValueError: the activations of the architecture, or of a technique, are not planned.
    """
    if sizes.moe is not None:
        _require_whole_layers(memory, "layers with experts")
    if sizes.adapters is not None:
        _require_whole_layers(memory, "lora_rank")
    if memory.attention_head_groups == "auto":
        raise ValueError(
            "attention_head_groups 'auto' depends on the first step's free memory: plan a number of groups"
        )
    if memory.attention_head_groups is not None:
        require_head_groups(memory.attention_head_groups, (sizes.heads, sizes.kv_heads))
    parts_of = _Layer(sizes, memory, layer_kernels(sizes, kernels, index), index)
    layer = parts_of.merged() if merges_inputs(sizes, memory, index) else parts_of.separate()
    magnitudes = Part("magnitudes", saves=fp8_magnitudes(sizes, memory, index))
    return replace(layer, parts=(*layer.parts, magnitudes))


def _require_whole_layers(memory: MemoryConfig, what: str) -> None:
    """Raise ``ValueError`` if ``memory`` splits layers or moves their weights, which ``what`` do not support."""
    for name in ("mlp_tile_tokens", "attention_head_groups", "cpu_offloading_weights"):
        value = getattr(memory, name)
        if value:
            raise ValueError(f"{name} {value!r} does not support {what}: leave it out")


@dataclass(frozen=True)
class _Layer:
    """A decoder layer.

    Args:
        sizes: sizes of the rank.
        memory: techniques of the layer.
        kernels: operations and attention.
        index: number of the layer.
    """

    sizes: RankSizes
    memory: MemoryConfig
    kernels: Kernels
    index: int

    def separate(self) -> Part:
        """Return the parts of a layer whose attention and MLP are separate blocks, parallel or one after the other."""
        sizes = self.sizes
        # The input of a later stage of a pipeline depends on the adapters of earlier ones.
        has_grad = sizes.adapters is None or self.index > 0 or not sizes.has_embedding
        attention, attended = self._attention({"normed attention input": sizes.residual_bytes}, has_grad=has_grad)
        into_mlp = has_grad or attended
        second = "mlp input"
        # GPT-NeoX's parallel branches have one input; else the MLP's depends on attention.
        if sizes.parallel_residual:
            into_mlp, second = has_grad, "layer input"
        # The statistics of the routers before this layer are an input of the layer.
        statistics: Tensors = {}
        if sizes.moe is not None and self.index > 0:
            statistics = {ROUTER_STATISTICS: self.index * sizes.moe.row_bytes}
        mlp, expanded = self._mlp(statistics, has_grad=into_mlp)
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
        return Part("layer", {"layer input": sizes.residual_bytes} | statistics, masks, parts)

    def merged(self) -> Part:
        """Return the parts of GPT-NeoX's layer with merged branches.

        The projections save the layer's input and its statistics; backward normalises and gathers
        again (``modules/parallel_residual.py``). The norms are not called, so nothing changes if they are recomputed.
        """
        norm = layer_norm_tensors(self.sizes, self.kernels, "layer input")
        attention, _ = self._attention({}, has_grad=True)
        mlp, _ = self._plain_mlp({}, has_grad=True)
        return Part("layer", norm.inputs, norm.saves, (attention, mlp))

    def _trains(self, name: str) -> bool:
        """Return whether the linear layer ``name`` has trained weights, of its own or of its adapter."""
        return self.sizes.adapters is None or self.sizes.adapters.on(name)

    def _rounds(self, name: str) -> bool:
        """Return whether the linear layers ``name`` of ``RankSizes.linear_elements`` round to float8."""
        return name in self.sizes.fp8_linears(self.index)

    def _norm(self, name: str, suffix: str = "", *, has_grad: bool) -> Part:
        return norm_tensors(self.sizes, self.kernels, name, suffix) if has_grad else Part("norm")

    def _source(self, module: str, norm: str, normed: Tensors, *, has_grad: bool) -> Tensors:
        """Return what the first linear layers of ``module`` keep of their input.

        Adapters keep what the norm before them keeps, if their input can be computed from that.

        Args:
            module: ``"attn"`` or ``"mlp"``.
            norm: name of the norm's input.
            normed: result of the norm.
            has_grad: whether the norm's input has a gradient.
        """
        adapters = self.sizes.adapters
        if adapters is None or not self.sizes.is_gated:
            return normed
        # A copy of the norm's input in fp32 does not help. A checkpoint around one of both keeps the result.
        keeps_input = self.kernels.fused or self.sizes.element_bytes == FP32_BYTES
        is_separate = {"norm", module} & set(self.memory.recompute_modules or ())
        if not has_grad or not keeps_input or is_separate or adapters.has_dropout:
            return normed
        return self._norm(norm, has_grad=True).saves

    def _input(self, name: str, source: Tensors, *, has_grad: bool, rounds: bool = False) -> Tensors:
        """Return what linear layer ``name`` saves for the gradients of its weights, or of its adapter's.

        Args:
            name: the layer.
            source: its input.
            has_grad: whether the input has a gradient.
            rounds: the layer is column-parallel and rounds its input to float8.
        """
        adapters = self.sizes.adapters
        if adapters is None:
            return saved_input(self.sizes, source, rounds=rounds)
        if not adapters.on(name):
            return {}
        element = self.sizes.element_bytes
        # Under sequence parallelism this rank's tokens: A is applied to a shard, or its result is scattered.
        size = self.sizes.shard_tokens * adapters.rank * element
        if not adapters.has_dropout:
            # The parts of a fused layer have one A, which is applied once.
            return source | {f"{fused_name(self.sizes.model_type, name)} A": size}
        result = {f"{name} A": size}
        # The adapter's input is a dropped copy.
        size = sum(source.values())
        result[f"{name} dropped input"] = size
        if has_grad:
            # PyTorch's CPU operators save factors, its CUDA kernel a boolean each.
            result[f"{name} dropout"] = size // element if self.kernels.fused else size
        return result

    def _attention(self, inputs: Tensors, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of attention, and whether its output has a gradient; ``has_grad`` of ``inputs``."""
        sizes = self.sizes
        names, output_name = ("query_key_value",) * 3, "dense"
        if sizes.is_gated:
            names, output_name = ("q_proj", "k_proj", "v_proj"), "o_proj"
        grads = tuple(has_grad or self._trains(name) for name in names)
        if not any(grads) and not self._trains(output_name):
            return Part("attn"), False
        # Each group of heads runs under a checkpoint (``modules/head_groups.py``).
        if self.memory.attention_head_groups is not None:
            return Part("attn", inputs, inputs), True
        source = self._source("attn", "layer input", inputs, has_grad=has_grad)
        saves: Tensors = {}
        for name in names:
            saves |= self._input(name, source, has_grad=has_grad, rounds=self._rounds("qkv"))
        context = {"attention": sizes.column_bytes(sizes.query)}
        saves |= self._input(output_name, context, has_grad=any(grads))
        if sizes.model_type in MODEL_TYPES_WITH_QK_NORM:
            heads = (("query", sizes.heads), ("key", sizes.kv_heads))
            for (name, number), exists in zip(heads, grads, strict=False):
                if exists:
                    saves |= head_norm_tensors(sizes, self.kernels, name, number)
        return Part("attn", inputs, saves, (self._core(grads),)), True

    def _core(self, grads: tuple[bool, ...]) -> Part:
        """Return what core attention saves; ``grads`` of query, key and value."""
        if not any(grads):
            return Part("core_attn")
        # One float8 matmul computes all three on all devices.
        shares = not self.sizes.is_gated or (self.sizes.adapters is None and self._rounds("qkv"))
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

    def _mlp(self, statistics: Tensors, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of the MLP or the experts, and whether the output has a gradient."""
        inputs = {"normed mlp input": self.sizes.residual_bytes}
        if self.sizes.moe is not None:
            return self._experts(inputs, statistics), True
        if self.sizes.is_gated:
            return self._gated_mlp(inputs, has_grad=has_grad)
        return self._plain_mlp(inputs, has_grad=has_grad)

    def _experts(self, inputs: Tensors, statistics: Tensors) -> Part:
        """Return what a mixture of experts saves; the statistics of the layers before only if it is checkpointed."""
        sizes = self.sizes
        assert sizes.moe is not None
        saves = expert_tensors(sizes, sizes.moe, fused=self.kernels.fused, rounds=sizes.fp8_experts(self.index))
        # Of the shared expert, next to the input of the router.
        if self._rounds("mlp in"):
            saves |= saved_input(sizes, inputs, rounds=True)
        return Part("moe", inputs | statistics, saves)

    def _gated_mlp(self, inputs: Tensors, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of a gated MLP, and whether its output has a gradient."""
        sizes = self.sizes
        gate, up = (has_grad or self._trains(name) for name in ("gate_proj", "up_proj"))
        if not (gate or up or self._trains("down_proj")):
            return Part("mlp"), False
        if self.memory.mlp_tile_tokens is not None:
            return Part("mlp", inputs, inputs), True
        source = self._source("mlp", "mlp input", inputs, has_grad=has_grad)
        saves: Tensors = {}
        for name in ("gate_proj", "up_proj"):
            saves |= self._input(name, source, has_grad=has_grad, rounds=self._rounds("mlp in"))
        # The kernel of the gated activation with its projection recomputes the result. It does not run with an
        # adapter on the projection that has dropout.
        drops = sizes.adapters is not None and sizes.adapters.has_dropout and sizes.adapters.on("down_proj")
        if self.kernels.fused and not drops:
            saves |= self._input("down_proj", {}, has_grad=True)
            return Part("mlp", inputs, saves, (self._fused_act(),)), True
        act = Part("mlp_act")
        has_act = gate or up
        if has_act and self.kernels.fused:
            act = self._fused_act()
        elif has_act:
            act = self._plain_act(gate=gate, up=up)
        saves |= self._input("down_proj", {"mlp activation": sizes.column_bytes(sizes.width)}, has_grad=has_act)
        return Part("mlp", inputs, saves, (act,)), True

    def _fused_act(self) -> Part:
        """Return what the kernel of the gated activation saves: gate and up.

        Both are views of one storage. An adapter with dropout adds its output to a copy of its projection's, and
        a projection without an adapter keeps all of the storage.
        """
        width = self.sizes.column_bytes(self.sizes.width)
        adapters = self.sizes.adapters
        both: Tensors = {}
        for name in ("gate_proj", "up_proj"):
            if adapters is not None and adapters.has_dropout and adapters.on(name):
                both[f"adapted {name}"] = width
            else:
                both["gate, up"] = 2 * width
        return Part("mlp_act", both, both)

    def _plain_act(self, *, gate: bool, up: bool) -> Part:
        """Return what plain operations save of the gated activation; ``gate`` and ``up`` have gradients."""
        width = self.sizes.column_bytes(self.sizes.width)
        # One float8 matmul computes both.
        if self.sizes.adapters is None and self._rounds("mlp in"):
            both = {"gate, up": 2 * width}
            return Part("mlp_act", both, both | {"activated gate": width})
        is_relu = self.sizes.hidden_act == "relu"
        kept = {
            # ReLU's gradient needs its result, not its input.
            "gate": gate and not is_relu,
            "up": gate,
            "activated gate": up or (gate and is_relu),
        }
        return Part("mlp_act", {"gate": width, "up": width}, {name: width for name, is_kept in kept.items() if is_kept})

    def _plain_mlp(self, inputs: Tensors, *, has_grad: bool) -> tuple[Part, bool]:
        """Return the parts of GPT-NeoX's MLP, and whether its output has a gradient."""
        sizes = self.sizes
        has_act = has_grad or self._trains("dense_h_to_4h")
        if not has_act and not self._trains("dense_4h_to_h"):
            return Part("mlp"), False
        if self.memory.mlp_tile_tokens is not None:
            return Part("mlp", inputs, inputs), True
        width = sizes.column_bytes(sizes.width)
        expanded, result = {"expanded": width}, {"mlp activation": width}
        act = Part("mlp_act")
        # ReLU's gradient needs its result, not its input.
        is_relu = sizes.hidden_act == "relu"
        if has_act:
            act = Part("mlp_act", expanded, result if is_relu else expanded)
        if self._rounds("mlp out") and merges_branches(sizes, self.memory) and not is_relu:
            result = {}  # backward computes it again (``fp8_linear.Source``)
        saves = self._input("dense_h_to_4h", inputs, has_grad=has_grad, rounds=self._rounds("mlp in"))
        saves = saves | self._input("dense_4h_to_h", result, has_grad=has_act)
        return Part("mlp", inputs, saves, (act,)), True


def rotates_with_grad(sizes: RankSizes, memory: MemoryConfig) -> bool:
    """Return whether a layer keeps the tables of RoPE for backward; the only one may have no such gradient."""
    is_first_alone = sizes.num_layers == 1 and sizes.has_embedding
    if sizes.adapters is None or not is_first_alone or memory.recompute_granularity == "full":
        return True
    return sizes.adapters.on("q_proj", "k_proj", "query_key_value")
