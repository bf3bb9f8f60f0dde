"""Frozen, self-validating configuration dataclasses; imports the standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nxd_memopt.options import Resume, check_options, option, require_one_of

COMPILE = (None, "layer")
HIDDEN_ACTS = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
)
ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
RECOMPUTE_MODULES = ("core_attn", "attn", "norm", "mlp_act", "mlp", "moe")
AttentionBackend = Literal["auto", "flash4", "cudnn", "flash", "efficient", "sdpa", "tiled", "nki", "math"]
ATTENTION_BACKENDS = get_args(AttentionBackend)


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
        remedy = remedy or f"use {near} for {what}, or another {by} that divides {value}"
        raise ValueError(f"{what} {value} is not divisible by {by} {divisor}: {remedy}")
    return value // divisor


def require_positive_integer(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer of at least 1."""
    # type(), not isinstance(): a bool is an int too
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


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
        pipeline_model_parallel_size: P, the number of ranks that share the stack of layers, one stage of consecutive
            layers each. Micro-batches pass through the stages one after the other (arXiv:1811.06965).
        virtual_pipeline_model_parallel_size: V, the number of stages of each rank, which shortens the time in which
            ranks wait at the start and the end of a step (arXiv:2104.04473, interleaved schedule). ``None`` is 1.
        pipeline_model_parallel_layout: decoder layers of each of the P * V stages. ``None`` balances the stages by
            the weights of layers and head.
    """

    tensor_model_parallel_size: int = option(1, resume=Resume.REPORTED, minimum=1)
    sequence_parallel_enabled: bool = option(False, resume=Resume.REPORTED, nemo=["sequence_parallel"])
    reduce_dtype: Literal["float32"] | None = option(None, resume=Resume.WHEN_ASKED)
    use_cpu_initialization: bool = option(True, resume=Resume.NOT_COMPARED)
    expert_model_parallel_size: int = option(1, resume=Resume.REPORTED, minimum=1)
    pipeline_model_parallel_size: int = option(1, resume=Resume.REPORTED, minimum=1)
    virtual_pipeline_model_parallel_size: int | None = option(None, resume=Resume.REPORTED, minimum=1)
    pipeline_model_parallel_layout: tuple[int, ...] | None = option(None, resume=Resume.REPORTED, minimum=1)

    def __post_init__(self) -> None:
        check_options(self)
        # With one rank there is nothing to shard. An error, because a script that sets the switch
        # counts on less activation memory.
        if self.sequence_parallel_enabled and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel_enabled=True needs tensor_model_parallel_size above 1, got 1: "
                "raise tensor_model_parallel_size or turn sequence_parallel_enabled off"
            )
        if self.pipeline_model_parallel_size == 1 and self.num_chunks > 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size {self.num_chunks} needs pipeline_model_parallel_size above 1: "
                "raise that, or leave it out"
            )

    @property
    def ranks_of_replica(self) -> int:
        """T * P, the ranks that have one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def num_chunks(self) -> int:
        """V, the stages of each rank of a pipeline."""
        return self.virtual_pipeline_model_parallel_size or 1


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
            the activations of one layer at a time, at the cost of a second recomputation of every layer
            of a chunk except the last. ``None`` recomputes each layer separately. For ``"selective"``: ``"block"``
            recomputes the named submodules of the model's first ``recompute_num_layers`` layers
            only, ``None`` those of all layers.
        recompute_num_layers: layers per chunk (``uniform``, ``nested``) or recomputed layers
            (``block``). ``nested`` chooses about the square root of the number of layers if it is
            ``None`` (``planner.techniques.recomputation.nested_chunk_layers``).
        recompute_modules: for ``"selective"``: any of ``core_attn``, ``attn``, ``norm``,
            ``mlp_act``, ``mlp``, ``moe`` (mixture-of-experts layers); default ``("core_attn",)``.
        recompute_keep_core_attn: with ``"full"``: keep the results of the attention kernel
            (``[B, h/T, S, d]`` per layer, and its log-sum-exps) instead of recomputing them; at
            long sequences the kernel takes most of a layer's time. ``True`` or ``"all"`` keeps them for all
            recomputed layers, a number for this many last ones, with one layer per checkpoint.
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
    """

    recompute_granularity: Literal["selective", "full"] | None = option(
        None,
        resume=Resume.REPORTED,
        nemo={
            "activations_checkpoint_granularity": None,
            # neuronx-distributed's switch
            "selective_activation_checkpointing_is_enabled": {True: "selective", False: None},
        },
    )
    recompute_method: Literal["uniform", "block", "nested"] | None = option(
        None, resume=Resume.REPORTED, nemo=["activations_checkpoint_method"]
    )
    recompute_num_layers: int | None = option(None, resume=Resume.REPORTED, nemo=["activations_checkpoint_num_layers"])
    recompute_modules: tuple[str, ...] | None = option(None, resume=Resume.REPORTED)
    recompute_keep_core_attn: bool | int | Literal["all"] = option(False, resume=Resume.REPORTED, minimum=1)
    cpu_offloading_num_layers: int = option(0, resume=Resume.REPORTED, minimum=0)
    cpu_offloading_activations: bool = option(False, resume=Resume.REPORTED)
    cpu_offloading_weights: bool = option(False, resume=Resume.REPORTED)
    mlp_tile_tokens: int | Literal["auto"] | None = option(None, resume=Resume.REPORTED, minimum=1)
    attention_head_groups: int | Literal["auto"] | None = option(None, resume=Resume.REPORTED, minimum=1)
    attention_backend: Literal["auto", "flash4", "cudnn", "flash", "efficient", "sdpa", "tiled", "nki", "math"] = (
        option("auto", resume=Resume.REPORTED)
    )
    fused_linear_cross_entropy: bool = option(True, resume=Resume.REPORTED)

    def __post_init__(self) -> None:
        check_options(self)
        # True equals 1, which keeps the results of one layer: dictionaries and caches could not tell them apart.
        if self.recompute_keep_core_attn is True:
            object.__setattr__(self, "recompute_keep_core_attn", "all")
        self._check_recompute_modules()
        self._check_recompute()
        self._check_kept_attention()
        self._check_offload()
        self._check_tiles()
        self._check_head_groups()

    @property
    def offloads(self) -> bool:
        """Whether layers have activations, checkpoints or weights in host memory."""
        return self.cpu_offloading_activations or self.cpu_offloading_num_layers > 0

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
            ValueError: ``recompute_keep_core_attn`` exceeds the recomputed layers.
        """
        if not self.recompute_keep_core_attn:
            return range(0)
        first = 0 if self.cpu_offloading_activations else self.num_offloaded_layers(num_layers)
        stop = num_layers
        if self.recompute_method == "block" and self.recompute_num_layers is not None:
            stop = min(stop, first + self.recompute_num_layers)
        number = self.recompute_keep_core_attn
        if number == "all":
            return range(first, stop)
        if number > stop - first:
            raise ValueError(
                f"recompute_keep_core_attn {number} exceeds the {stop - first} recomputed layers: lower it"
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
            raise ValueError(f"recompute_num_layers {number} exceeds the {num_layers} layers: lower it")
        return number

    def _check_recompute_modules(self) -> None:
        selective = self.recompute_granularity == "selective"
        names = self.recompute_modules
        # Megatron's default: the attention core has the largest activations for the least
        # recomputation (arXiv:2205.05198, section 5).
        if names is None and selective:
            names = ("core_attn",)
        if names is None:
            return
        if not names:
            raise ValueError(f"recompute_modules is empty: name one or more of {list(RECOMPUTE_MODULES)}")
        for name in names:
            require_one_of("recompute_modules entry", name, RECOMPUTE_MODULES)
        if not selective:
            raise ValueError(
                f"recompute_modules {list(names)} needs recompute_granularity 'selective', got "
                f"{self.recompute_granularity!r}: set it, or leave recompute_modules out"
            )
        object.__setattr__(self, "recompute_modules", names)

    def _check_recompute(self) -> None:
        method = self.recompute_method
        num_layers = self.recompute_num_layers
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
        if num_layers is not None and num_layers < 1:
            raise ValueError(
                f"recompute_num_layers must be at least 1, got {num_layers}: for all layers leave it and "
                "recompute_method out, for none recompute_granularity"
            )

    def _check_kept_attention(self) -> None:
        kept = self.recompute_keep_core_attn
        if not kept:
            return
        if self.recompute_granularity != "full":
            raise ValueError(
                f"recompute_keep_core_attn={kept!r} needs recompute_granularity 'full', got "
                f"{self.recompute_granularity!r}: set it, or leave recompute_keep_core_attn out"
            )
        # The results of all layers would be kept, each as large as the inputs that nesting drops.
        if self.recompute_method == "nested":
            raise ValueError(
                f"recompute_keep_core_attn={kept!r} keeps a tensor of every layer, and recompute_method 'nested' "
                "only the input of every n-th: use recompute_method 'uniform', or leave one out"
            )
        # A checkpoint of several layers keeps the results of all of them or of none.
        if kept != "all" and self.recompute_method == "uniform" and self.recompute_num_layers != 1:
            raise ValueError(
                f"recompute_keep_core_attn={kept!r} needs one layer per checkpoint, got recompute_method "
                f"'uniform' with {self.recompute_num_layers}: leave the method out, or use 'block'"
            )

    def _check_tiles(self) -> None:
        tokens = self.mlp_tile_tokens
        if tokens is None:
            return
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
        offloads_checkpoints = self.cpu_offloading_activations
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
