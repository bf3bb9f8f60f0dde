"""Frozen, self-validating configuration dataclasses; imports the standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

RECOMPUTE_GRANULARITIES = (None, "selective", "full")
RECOMPUTE_METHODS = (None, "uniform", "block", "nested")
RECOMPUTE_MODULES = ("core_attn", "attn", "norm", "mlp_act", "mlp", "moe")
ATTENTION_BACKENDS = (
    "auto",
    "flash4",
    "cudnn",
    "flash",
    "efficient",
    "sdpa",
    "tiled",
    "nki",
    "math",
)
REDUCE_DTYPES = (None, "float32")
MOE_LOAD_BALANCING_TYPES = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "hf_aux_loss", "sinkhorn")
MOE_DISPATCHERS = ("allgather", "alltoall")
MOE_DROP_POLICIES = ("probs", "position")
MOE_SCORE_FUNCTIONS = ("softmax", "sigmoid")
MOE_ROUTER_DTYPES = (None, "fp32", "fp64")

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "hf_aux_loss", "sinkhorn"]

ConfigT = TypeVar("ConfigT")


def require_divisible(what: str, value: int, by: str, divisor: int, remedy: str = "") -> int:
    """Return ``value // divisor``.

    Args:
        what: name of the value, for the message.
        value: number to divide.
        by: name of the divisor, for the message.
        divisor: at least 1.
        remedy: replaces the message's own remedy.

    Raises:
        ValueError: the division leaves a remainder; the message has both values and the remedy.
    """
    if divisor < 1:
        raise ValueError(f"{by} must be at least 1, got {divisor}")
    if value % divisor:
        # The nearest multiples of the divisor; 0 is no remedy.
        lower = value // divisor * divisor
        upper = -(-value // divisor) * divisor
        near = f"{lower} or {upper}" if lower else f"{upper}"
        remedy = remedy or f"use {near} for {what}, or a {by} that divides {value}"
        raise ValueError(f"{what} {value} is not divisible by {by} {divisor}: {remedy}")
    return value // divisor


def require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ``ValueError``, with the nearest allowed value, if ``value`` is not in ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not one of {list(allowed)}{_nearest(value, allowed)}")


def _nearest(value: object, allowed: tuple[object, ...]) -> str:
    # The cutoff of 0.5 is below difflib's default 0.6: a poor suggestion costs a user less than a
    # missing one.
    names = [str(name) for name in allowed]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    if not close:
        return ""
    return f": did you mean {close[0]!r}?"


def from_mapping(cls: type[ConfigT], values: Mapping[str, Any], *, section: str) -> ConfigT:
    """Build the dataclass ``cls`` from a mapping such as a YAML section.

    Args:
        cls: dataclass to build.
        values: field names and values.
        section: name of the section, for messages.

    Raises:
        ValueError: a key is not a field of ``cls``; the message has the nearest field name.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{section} must be a mapping of option names to values, got {type(values).__name__}")
    # An unknown key would be a TypeError of the constructor, without a suggestion.
    known = tuple(field.name for field in dataclasses.fields(cls))  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in known:
            remedy = _nearest(key, known) or f": known are {list(known)}"
            raise ValueError(f"unknown key {key!r} in {section}{remedy}")
    return cls(**values)


@dataclass(frozen=True)
class ParallelConfig:
    """Options for splitting one model over processes.

    Args:
        tensor_model_parallel_size: T, the number of ranks that share one layer.
        sequence_parallel_enabled: shard the residual stream along the sequence, ``[S/T, B, H]``
            (arXiv:2205.05198).
        reduce_dtype: ``None`` reduces the linear layers' partial outputs and input gradients in
            their own dtype; ``"float32"`` reduces them in fp32 at twice the bytes for bf16.
        use_cpu_initialization: True draws initial weights on the CPU, equal for every T. False
            lets each rank draw its own shards on its device, which is fast for large models, but
            gives different weights for each T.
        expert_model_parallel_size: EP, the number of ranks that share the experts of a MoE layer:
            data-parallel ranks, which have all other parameters in common. 1 for dense models.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel_enabled: bool = False
    reduce_dtype: Literal["float32"] | None = None
    use_cpu_initialization: bool = True
    expert_model_parallel_size: int = 1

    def __post_init__(self) -> None:
        size = self.tensor_model_parallel_size
        _require_integer("expert_model_parallel_size", self.expert_model_parallel_size)
        # type(), not isinstance(): a bool is an int too
        if type(size) is not int:
            raise ValueError(f"tensor_model_parallel_size must be an integer, got {size!r}")
        if type(self.sequence_parallel_enabled) is not bool:
            raise ValueError(f"sequence_parallel_enabled must be true or false, got {self.sequence_parallel_enabled!r}")
        if size < 1:
            raise ValueError(f"tensor_model_parallel_size must be at least 1, got {size}")
        # With one rank there is nothing to shard. An error, because a script that sets the switch
        # counts on less activation memory.
        if self.sequence_parallel_enabled and size == 1:
            raise ValueError(
                "sequence_parallel_enabled=True needs tensor_model_parallel_size above 1, got 1: "
                "raise tensor_model_parallel_size or turn sequence_parallel_enabled off"
            )
        require_one_of("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)


@dataclass(frozen=True)
class MemoryConfig:
    """Memory techniques for a model. Names and values follow Megatron and NeMo.

    Args:
        recompute_granularity: ``None`` keeps every activation; ``"full"`` keeps only each layer's
            input and recomputes the layer in backward; ``"selective"`` recomputes only the named
            submodules.
        recompute_method: for ``"full"``: ``"uniform"`` recomputes all layers in chunks of
            ``recompute_num_layers``; ``"block"`` recomputes only the first
            ``recompute_num_layers`` layers; ``"nested"`` keeps one input per chunk as ``uniform``
            does, and in backward recomputes the chunk's other inputs first and then layer by layer:
            the activations of one layer at a time, for one more forward of all layers of a chunk
            but the last. ``None`` recomputes each layer separately. For ``"selective"``: ``"block"``
            recomputes the named submodules of the model's first ``recompute_num_layers`` layers
            only, ``None`` those of all layers.
        recompute_num_layers: layers per chunk (``uniform``, ``nested``) or recomputed layers
            (``block``). ``nested`` chooses about the square root of the number of layers if it is
            ``None`` (``planner.formulas.nested_chunk_layers``).
        recompute_modules: for ``"selective"``: any of ``core_attn``, ``attn``, ``norm``,
            ``mlp_act``, ``mlp``, ``moe`` (mixture-of-experts layers); default ``("core_attn",)``.
        recompute_keep_core_attn: with ``"full"``: keep the results of the attention kernel
            (``[B, h/T, S, d]`` per layer, and its log-sum-exps) instead of recomputing them; at
            long sequences the kernel takes most of a layer's time.
        recompute_keep_core_attn_num_layers: keep those results for this many last recomputed layers
            only, with one layer per checkpoint; ``None``: for all.
        cpu_offloading: NeMo's switch in addition to the number of layers; ``None`` follows the
            other two options.
        cpu_offloading_num_layers: this many first layers keep their activations in host memory
            between forward and backward; ``"full"`` recompute then applies to the layers after
            them, unless ``cpu_offloading_activations`` is set. Needs an NVIDIA GPU.
        cpu_offloading_activations: with ``"full"``: all layers are recomputed, and what they keep
            for it (their inputs, and the results of ``recompute_keep_core_attn``) waits in host
            memory, for the first ``cpu_offloading_num_layers`` layers or, if that is 0, for all
            recomputed layers. A chunk belongs to its first layer. Needs an NVIDIA GPU.
        cpu_offloading_weights: keep the weights of the first ``cpu_offloading_num_layers`` layers in
            host memory between their uses; their activations stay on the device, unless
            ``cpu_offloading_activations`` is set. Needs an NVIDIA GPU.
        mlp_tile_tokens: compute the MLP for this many tokens at a time (all tensor-parallel ranks'
            shards together), forward and backward; only its input is saved. ``"auto"`` takes 32,768
            tokens, or fewer if the device's free memory in the first step demands it.
        attention_head_groups: compute attention for this many groups of heads one after the other,
            from the projection of the input to the output projection; only the input is saved, and
            backward runs each group again. ``"auto"``, with each layer recomputed by itself, divides
            the heads only if the device's free memory in the first step demands it.
        attention_backend: ``"auto"`` takes, for each call, the first of the device's
            implementations that can run it. A name takes that implementation or fails:
            ``"flash4"`` (FlashAttention-4, from the package flash-attn-4), ``"cudnn"``,
            ``"flash"`` (FlashAttention-2) and ``"efficient"`` (from xFormers) are kernels for
            NVIDIA GPUs, ``"sdpa"`` is PyTorch's choice on other devices, ``"tiled"`` is plain
            PyTorch without S x S scores, ``"nki"`` are AWS Neuron's flash kernels, and ``"math"``
            is the reference, which materialises S x S scores.
        fused_linear_cross_entropy: compute the loss without ever materialising all logits
            (``loss_functions.fused_linear_cross_entropy``); the head's module is then not called.
            ``False`` computes the logits, as does ``return_logits``.
        selective_activation_checkpointing_is_enabled: NxD's switch for
            ``recompute_granularity="selective"`` with ``recompute_modules=("core_attn",)``.
    """

    recompute_granularity: Literal["selective", "full"] | None = None
    recompute_method: Literal["uniform", "block", "nested"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    recompute_keep_core_attn: bool = False
    recompute_keep_core_attn_num_layers: int | None = None
    cpu_offloading: bool | None = None
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = False
    cpu_offloading_weights: bool = False
    mlp_tile_tokens: int | Literal["auto"] | None = None
    attention_head_groups: int | Literal["auto"] | None = None
    attention_backend: Literal["auto", "flash4", "cudnn", "flash", "efficient", "sdpa", "tiled", "nki", "math"] = "auto"
    fused_linear_cross_entropy: bool = True
    selective_activation_checkpointing_is_enabled: bool = False

    def __post_init__(self) -> None:
        require_one_of("recompute_granularity", self.recompute_granularity, RECOMPUTE_GRANULARITIES)
        require_one_of("recompute_method", self.recompute_method, RECOMPUTE_METHODS)
        require_one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        # NxD's switch sets recompute_granularity, which the two checks after it read.
        self._apply_nxd_switch()
        self._check_recompute_modules()
        self._check_recompute()
        self._check_offload()
        self._check_tiles()
        self._check_head_groups()

    def num_offloaded_layers(self, num_layers: int) -> int:
        """Return how many first layers offload activations or checkpoints, of ``num_layers``."""
        if self.cpu_offloading_weights and not self.cpu_offloading_activations:
            return 0
        if not self.cpu_offloading_activations or self.cpu_offloading_num_layers:
            return self.cpu_offloading_num_layers
        if self.recompute_method == "block" and self.recompute_num_layers is not None:
            return self.recompute_num_layers
        return num_layers

    def layers_keeping_attention(self, num_layers: int) -> range:
        """Return the numbers of the layers whose attention results full recompute keeps, of ``num_layers``.

        Raises:
            ValueError: ``recompute_keep_core_attn_num_layers`` exceeds the recomputed layers.
        """
        if not self.recompute_keep_core_attn:
            return range(0)
        first = 0 if self.cpu_offloading_activations else self.num_offloaded_layers(num_layers)
        stop = num_layers
        if self.recompute_method == "block" and self.recompute_num_layers is not None:
            stop = min(stop, first + self.recompute_num_layers)
        number = self.recompute_keep_core_attn_num_layers
        if number is None:
            return range(first, stop)
        if number > stop - first:
            raise ValueError(
                f"recompute_keep_core_attn_num_layers {number} exceeds the {stop - first} recomputed layers: lower it"
            )
        return range(stop - number, stop)

    def num_selective_layers(self, num_layers: int) -> int:
        """Return how many first layers recompute the named submodules, of ``num_layers``.

        Raises:
            ValueError: ``recompute_num_layers`` exceeds ``num_layers``.
        """
        if self.recompute_granularity != "selective":
            return 0
        # set if and only if recompute_method is "block"
        number = self.recompute_num_layers
        if number is None:
            return num_layers
        if number > num_layers:
            raise ValueError(f"recompute_num_layers {number} exceeds the model's {num_layers} layers: lower it")
        return number

    def _apply_nxd_switch(self) -> None:
        if not self.selective_activation_checkpointing_is_enabled:
            return
        if self.recompute_granularity == "full":
            raise ValueError(
                "selective_activation_checkpointing_is_enabled=True contradicts recompute_granularity='full': set one"
            )
        # the dataclass is frozen: resolve the switch once, so that readers see only NeMo's names
        object.__setattr__(self, "recompute_granularity", "selective")

    def _check_recompute_modules(self) -> None:
        selective = self.recompute_granularity == "selective"
        names = self.recompute_modules
        # Megatron's default: the attention core has the largest activations for the least
        # recomputation (arXiv:2205.05198, section 5).
        if names is None and selective:
            names = ("core_attn",)
        if names is None:
            return
        # A string is a sequence too: "mlp" would be the modules m, l and p.
        if isinstance(names, str) or not names:
            raise ValueError(f"recompute_modules {names!r} must be a list of one or more of {list(RECOMPUTE_MODULES)}")
        for name in names:
            require_one_of("recompute_modules entry", name, RECOMPUTE_MODULES)
        if not selective:
            raise ValueError(
                f"recompute_modules {list(names)} needs recompute_granularity 'selective', got "
                f"{self.recompute_granularity!r}: set it, or leave recompute_modules out"
            )
        # YAML gives a list: store a tuple, which is immutable
        object.__setattr__(self, "recompute_modules", tuple(names))

    def _check_recompute(self) -> None:
        method = self.recompute_method
        num_layers = self.recompute_num_layers
        for name in ("recompute_num_layers", "cpu_offloading_num_layers"):
            value = getattr(self, name)
            # type(), not isinstance(): a bool is an int too
            if type(value) is not int and not (value is None and name == "recompute_num_layers"):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        # A value that the granularity does not use would be ignored, and the run would need more
        # memory than planned: each such combination is an error.
        granularity = self.recompute_granularity
        if method is not None and granularity != "full" and not (granularity == "selective" and method == "block"):
            remedy = "set it, or leave recompute_method out"
            if granularity == "selective":
                remedy = "use 'block' for the first recompute_num_layers layers, or leave it out for all layers"
            raise ValueError(
                f"recompute_method {method!r} needs recompute_granularity 'full', got {granularity!r}: {remedy}"
            )
        chooses_layers = method == "nested" and num_layers is None
        if (method is None) != (num_layers is None) and not chooses_layers:
            raise ValueError(
                f"recompute_method {method!r} and recompute_num_layers {num_layers!r} go together: set both or neither"
            )
        if self.recompute_keep_core_attn and self.recompute_granularity != "full":
            raise ValueError(
                "recompute_keep_core_attn=True needs recompute_granularity 'full', got "
                f"{self.recompute_granularity!r}: set it, or leave recompute_keep_core_attn out"
            )
        self._check_kept_layers()
        if num_layers is not None and num_layers < 1:
            raise ValueError(
                f"recompute_num_layers must be at least 1, got {num_layers}: for all layers leave it and "
                "recompute_method out, for none recompute_granularity"
            )
        # The results of all layers would be kept, each as large as the inputs that nesting drops.
        if self.recompute_keep_core_attn and method == "nested":
            raise ValueError(
                "recompute_keep_core_attn=True keeps a tensor of every layer, and recompute_method 'nested' "
                "only the input of every n-th: use recompute_method 'uniform', or leave one out"
            )

    def _check_kept_layers(self) -> None:
        number = self.recompute_keep_core_attn_num_layers
        if number is None:
            return
        if not self.recompute_keep_core_attn:
            raise ValueError(
                f"recompute_keep_core_attn_num_layers {number} needs recompute_keep_core_attn=True: set it, or leave "
                "the number out"
            )
        if type(number) is not int or number < 1:
            raise ValueError(
                f"recompute_keep_core_attn_num_layers must be an integer of at least 1, got {number!r}: to keep "
                "nothing leave recompute_keep_core_attn out"
            )
        # A checkpoint of several layers keeps the results of all of them or of none.
        if self.recompute_method == "uniform" and self.recompute_num_layers != 1:
            raise ValueError(
                f"recompute_keep_core_attn_num_layers {number} needs one layer per checkpoint, got recompute_method "
                f"'uniform' with {self.recompute_num_layers}: leave the method out, or use 'block'"
            )

    def _check_tiles(self) -> None:
        tokens = self.mlp_tile_tokens
        if tokens is None:
            return
        if tokens != "auto" and type(tokens) is not int:
            raise ValueError(f"mlp_tile_tokens must be an integer, 'auto' or null, got {tokens!r}")
        if tokens != "auto" and tokens < 1:
            raise ValueError(f"mlp_tile_tokens must be at least 1, got {tokens}")
        # Backward of the tiles recomputes the MLP by itself, without calling the activation.
        recomputed = sorted({"mlp", "mlp_act"} & set(self.recompute_modules or ()))
        if recomputed:
            raise ValueError(
                f"mlp_tile_tokens {tokens} recomputes the MLP already, and recompute_modules has "
                f"{recomputed}: leave them out of recompute_modules"
            )

    def _check_head_groups(self) -> None:
        groups = self.attention_head_groups
        if groups is None:
            return
        if groups != "auto" and (type(groups) is not int or groups < 1):
            raise ValueError(f"attention_head_groups must be an integer of at least 1, 'auto' or null, got {groups!r}")
        # Without groups a layer that is not recomputed by itself would keep its queries, keys and
        # values until backward, or those of a whole chunk would exist at once.
        is_single = self.recompute_granularity == "full" and self.recompute_method in (None, "nested")
        if groups == "auto" and not is_single:
            raise ValueError(
                "attention_head_groups 'auto' needs recompute_granularity 'full' with recompute_method null or "
                f"'nested', got {self.recompute_granularity!r} with {self.recompute_method!r}: set them, or give a "
                "number of groups"
            )
        # Backward runs each group again, from the projection on.
        recomputed = sorted({"attn", "core_attn"} & set(self.recompute_modules or ()))
        if recomputed:
            raise ValueError(
                f"attention_head_groups {groups} recomputes attention already, and recompute_modules has "
                f"{recomputed}: leave them out of recompute_modules"
            )
        if self.recompute_keep_core_attn:
            raise ValueError(
                f"attention_head_groups {groups} recomputes attention, and recompute_keep_core_attn keeps its "
                "results: leave one out"
            )

    def _check_offload(self) -> None:
        num_layers = self.cpu_offloading_num_layers
        if num_layers < 0:
            raise ValueError(f"cpu_offloading_num_layers must be at least 0, got {num_layers}")
        offloads_checkpoints = self.cpu_offloading_activations
        if type(offloads_checkpoints) is not bool:
            raise ValueError(f"cpu_offloading_activations must be true or false, got {offloads_checkpoints!r}")
        if type(self.cpu_offloading_weights) is not bool:
            raise ValueError(f"cpu_offloading_weights must be true or false, got {self.cpu_offloading_weights!r}")
        if self.cpu_offloading_weights and num_layers == 0:
            raise ValueError(
                "cpu_offloading_weights=True needs cpu_offloading_num_layers above 0, got 0: "
                "set the number of layers, or leave cpu_offloading_weights out"
            )
        if offloads_checkpoints and self.recompute_granularity != "full":
            raise ValueError(
                "cpu_offloading_activations=True needs recompute_granularity 'full', got "
                f"{self.recompute_granularity!r}: set it, or offload all that the first layers save by "
                "cpu_offloading_num_layers alone"
            )
        is_block = offloads_checkpoints and self.recompute_method == "block"
        if is_block and self.recompute_num_layers is not None and num_layers > self.recompute_num_layers:
            raise ValueError(
                f"cpu_offloading_num_layers {num_layers} exceeds the recompute_num_layers "
                f"{self.recompute_num_layers} that recompute_method 'block' recomputes: lower it"
            )
        if self.cpu_offloading is not None and self.cpu_offloading != (num_layers > 0 or offloads_checkpoints):
            raise ValueError(
                f"cpu_offloading {self.cpu_offloading} contradicts cpu_offloading_num_layers "
                f"{num_layers}: set the number of layers, 0 for none, and "
                "leave the switch out"
            )


@dataclass(frozen=True)
class MoEConfig:
    """Options of mixture-of-experts layers. Names and defaults follow Megatron and NeMo.

    Args:
        num_moe_experts: E, experts of a layer.
        moe_router_topk: k, experts of a token.
        moe_router_load_balancing_type: ``"aux_loss"`` balances the tokens of each micro-batch of a
            data-parallel rank (arXiv:2101.03961), ``"seq_aux_loss"`` of each sequence,
            ``"global_aux_loss"`` of all data-parallel ranks; ``"hf_aux_loss"`` is the loss of
            transformers' models, over all layers together; ``"sinkhorn"`` assigns tokens evenly
            without a loss; ``"none"`` does neither.
        moe_aux_loss_coeff: factor of the balancing loss; 0 computes none.
        moe_z_loss_coeff: factor of the mean squared log-sum-exp of the router's logits
            (arXiv:2202.08906), or None.
        moe_input_jitter_eps: in training, multiply the router's input by numbers from
            ``[1 - eps, 1 + eps]``; the experts' input is unchanged. None for none.
        moe_token_dropping: None follows ``moe_expert_capacity_factor``; True or False must agree
            with it.
        moe_token_dispatcher_type: how tokens reach the experts of other ranks: ``"allgather"`` or
            ``"alltoall"``.
        moe_per_layer_logging: report the losses of each layer in addition to their sums.
        moe_expert_capacity_factor: each expert takes at most ``ceil(tokens * k / E * factor)``
            tokens of a micro-batch; None drops no token.
        moe_pad_expert_input_to_capacity: give each expert exactly that many rows, with zeros where
            it has fewer tokens: shapes do not depend on the routing.
        moe_token_drop_policy: which tokens an expert above its capacity keeps: those of the highest
            weight, ``"probs"``, or the first of the micro-batch, ``"position"``.
        moe_layer_recompute: recompute the MoE layer, router included, in backward.
        moe_layer_freq: ``n`` makes every n-th layer a MoE layer, beginning with the first; a list
            has 1 for each MoE layer and 0 for each dense one.
        moe_router_score_function: ``"softmax"`` or ``"sigmoid"`` (whose weights sum to 1).
        moe_router_pre_softmax: softmax over all experts before the top-k; default over the k chosen
            ones, whose weights then sum to 1.
        moe_router_dtype: dtype of the router's matmul and scores, ``"fp32"`` or ``"fp64"``; None
            multiplies in the dtype of the activations. Scores are fp32 at least.
        moe_router_enable_expert_bias: choose experts by score plus a bias that balances the load
            without a loss (arXiv:2408.15664). Needs the sigmoid score function.
        moe_router_bias_update_rate: step of that bias, per optimizer step.
        moe_shared_expert_intermediate_size: width of an MLP that all tokens pass in addition, all
            shared experts together, or None.
        moe_ffn_hidden_size: width of an expert; None takes the width of the dense MLP.
    """

    num_moe_experts: int
    moe_router_topk: int = 2
    moe_router_load_balancing_type: LoadBalancing = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_token_dropping: bool | None = None
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    moe_per_layer_logging: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_layer_recompute: bool = False
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_shared_expert_intermediate_size: int | None = None
    moe_ffn_hidden_size: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        require_one_of("moe_token_dispatcher_type", self.moe_token_dispatcher_type, MOE_DISPATCHERS)
        require_one_of("moe_token_drop_policy", self.moe_token_drop_policy, MOE_DROP_POLICIES)
        require_one_of("moe_router_score_function", self.moe_router_score_function, MOE_SCORE_FUNCTIONS)
        require_one_of("moe_router_dtype", self.moe_router_dtype, MOE_ROUTER_DTYPES)
        kind = self.moe_router_load_balancing_type
        require_one_of("moe_router_load_balancing_type", kind, MOE_LOAD_BALANCING_TYPES)
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk {self.moe_router_topk} exceeds num_moe_experts {self.num_moe_experts}: "
                "a token takes each expert at most once; lower it"
            )
        self._check_losses()
        self._check_router()
        self._check_capacity()
        self._check_layer_freq()

    def is_moe_layer(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each of ``num_layers`` decoder layers whether it is a MoE layer.

        Raises:
            ValueError: ``moe_layer_freq`` is a list of another length.
        """
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            return tuple(index % frequency == 0 for index in range(num_layers))
        if len(frequency) != num_layers:
            raise ValueError(
                f"moe_layer_freq lists {len(frequency)} layers and the model has {num_layers}: "
                "give one number for each layer"
            )
        return tuple(number == 1 for number in frequency)

    @property
    def has_aux_loss(self) -> bool:
        """Whether a load-balancing loss is computed."""
        return self.moe_aux_loss_coeff > 0

    def _check_types(self) -> None:
        _require_integer("num_moe_experts", self.num_moe_experts)
        _require_integer("moe_router_topk", self.moe_router_topk)
        for name in ("moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name))
        for name in _MOE_SWITCHES:
            value = getattr(self, name)
            if type(value) is not bool and not (value is None and name == "moe_token_dropping"):
                raise ValueError(f"{name} must be true or false, got {value!r}")

    def _check_losses(self) -> None:
        _require_at_least_0("moe_aux_loss_coeff", self.moe_aux_loss_coeff)
        _require_at_least_0("moe_router_bias_update_rate", self.moe_router_bias_update_rate)
        if self.moe_z_loss_coeff is not None:
            _require_at_least_0("moe_z_loss_coeff", self.moe_z_loss_coeff)
        eps = self.moe_input_jitter_eps
        if eps is not None:
            _require_at_least_0("moe_input_jitter_eps", eps)
            if eps >= 1:
                raise ValueError(f"moe_input_jitter_eps {eps} must be below 1: the input would change its sign")
        kind = self.moe_router_load_balancing_type
        if kind in ("none", "sinkhorn") and self.has_aux_loss:
            raise ValueError(
                f"moe_aux_loss_coeff {self.moe_aux_loss_coeff} needs a balancing loss, and "
                f"moe_router_load_balancing_type is {kind!r}: use 'aux_loss', or leave the coefficient out"
            )

    def _check_router(self) -> None:
        is_softmax = self.moe_router_score_function == "softmax"
        is_sinkhorn = self.moe_router_load_balancing_type == "sinkhorn"
        if self.moe_router_pre_softmax and not is_softmax:
            raise ValueError("moe_router_pre_softmax=True needs moe_router_score_function 'softmax', got 'sigmoid'")
        if self.moe_router_enable_expert_bias and is_softmax:
            raise ValueError(
                "moe_router_enable_expert_bias=True needs moe_router_score_function 'sigmoid', got 'softmax': "
                "set it, or balance the load by moe_router_load_balancing_type 'aux_loss'"
            )
        # Sinkhorn chooses the experts from the logits, and weighs them by a fixed rule.
        if is_sinkhorn and (not is_softmax or self.moe_router_pre_softmax):
            raise ValueError(
                "moe_router_load_balancing_type 'sinkhorn' has weights of its own: leave "
                "moe_router_score_function and moe_router_pre_softmax out"
            )
        if self.moe_router_load_balancing_type == "hf_aux_loss" and not is_softmax:
            raise ValueError(
                "moe_router_load_balancing_type 'hf_aux_loss' needs moe_router_score_function 'softmax', got "
                "'sigmoid': use 'seq_aux_loss', or leave the score function out"
            )
        if self.moe_router_topk == 1 and is_softmax and not is_sinkhorn and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_topk 1 with a softmax over the chosen expert alone gives each token the weight 1 and "
                "the router no gradient: set moe_router_pre_softmax=True"
            )

    def _check_capacity(self) -> None:
        factor = self.moe_expert_capacity_factor
        if factor is None:
            if self.moe_pad_expert_input_to_capacity:
                raise ValueError(
                    "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor, got None: set it, or "
                    "leave padding out"
                )
        elif type(factor) not in (int, float) or not 0 < factor < math.inf:
            raise ValueError(
                f"moe_expert_capacity_factor must be a number above 0, got {factor!r}: leave it out to drop no token"
            )
        dropping = self.moe_token_dropping
        if dropping is not None and dropping != (factor is not None):
            raise ValueError(
                f"moe_token_dropping {dropping} contradicts moe_expert_capacity_factor {factor!r}: set the factor, "
                "or None for no dropping, and leave the switch out"
            )

    def _check_layer_freq(self) -> None:
        frequency = self.moe_layer_freq
        if type(frequency) is int:
            _require_integer("moe_layer_freq", frequency)
            return
        if not isinstance(frequency, (list, tuple)) or any(number not in (0, 1) for number in frequency):
            raise ValueError(f"moe_layer_freq must be an integer or a list of 0 and 1, got {frequency!r}")
        if 1 not in frequency:
            raise ValueError(f"moe_layer_freq {list(frequency)} has no MoE layer: use a dense model")
        object.__setattr__(self, "moe_layer_freq", tuple(int(number) for number in frequency))


_MOE_SWITCHES = (
    "moe_token_dropping",
    "moe_per_layer_logging",
    "moe_pad_expert_input_to_capacity",
    "moe_layer_recompute",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
)


def _require_integer(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer of at least 1."""
    # type(), not isinstance(): a bool is an int too
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _require_at_least_0(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= cast(float, value) < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
