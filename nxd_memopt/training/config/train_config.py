"""The training program's configuration: one frozen, self-validating dataclass per section of the YAML file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nxd_memopt.config import (
    COMPILE,
    MemoryConfig,
    ParallelConfig,
    require_at_least,
    require_divisible,
    require_named,
    require_one_of,
)
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.data_parallel import (
    SHARDS_GRADIENTS,
    DataParallelConfig,
    require_compatible,
    require_expert_groups,
    require_gradient_sums,
    require_offloadable,
    require_updates_in_backward,
    resolve_sharding,
)
from nxd_memopt.training.config.lora import LoraOptions, require_trainable_adapters
from nxd_memopt.training.config.moe import MoEOptions
from nxd_memopt.training.config.optimizer import OptimizerConfig
from nxd_memopt.training.config.precision import resolve_precision

DTYPES = ("auto", "float32", "bfloat16", "float16")
SCHEDULE_CHANGES = ("error", "stretch", "keep")
RECIPES = Path(__file__).parents[1] / "recipes"
MAX_SEED = 2**62  # torch's generators take 64 bits; ranks and steps are added to the seed


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained.

    Args:
        pretrained: Hugging Face model directory (``config.json`` and safetensors, or a GGUF
            file); ``None`` builds from ``config_overrides`` alone.
        tokenizer: tokenizer directory or hub name; ``None`` takes the one in ``pretrained``.
        config_overrides: Hugging Face configuration values, e.g.
            ``{model_type: llama, hidden_size: 64}``; they override the configuration of
            ``pretrained`` if that is given. On the command line:
            ``--model.config-overrides.NAME VALUE``.
        random_init: keep the random initial weights instead of loading the weights of
            ``pretrained``.
        resize_embedding: give the embedding and the output head a row for each token of the tokenizer,
            if they have fewer, also in the export. The new rows are the mean of the rows of ``pretrained``.
        warm_start: a training checkpoint of this program, or the output directory of a run: its
            newest weights are the initial weights, of any dtype and parallel sizes. Optimizer,
            step and data start from the beginning. A run that has a checkpoint of its own continues from that.
        dtype: dtype of parameters and activations; ``auto`` follows ``trainer.precision``, and is
            ``float32`` without it. With ``bfloat16`` and ``float16`` the optimizer keeps fp32
            master weights, with ``float16`` the loss is scaled too.
    """

    pretrained: str | None = None
    tokenizer: str | None = None
    config_overrides: dict[str, Any] = field(default_factory=dict)
    random_init: bool = False
    resize_embedding: bool = False
    warm_start: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        require_one_of("model.dtype", self.dtype, DTYPES)
        require_named("model.pretrained", self.pretrained)
        require_named("model.tokenizer", self.tokenizer)
        require_named("model.warm_start", self.warm_start)
        # Without a directory nothing else says which architecture to build, or which tokenizer
        # belongs to it.
        if self.pretrained is None and "model_type" not in self.config_overrides:
            raise ValueError(
                "model.pretrained is not set and model.config_overrides has no model_type: name "
                "a Hugging Face directory, or a model_type such as llama with its sizes"
            )
        if self.pretrained is None and self.tokenizer is None:
            raise ValueError("model.tokenizer is needed where model.pretrained is not set: name a tokenizer directory")
        if self.pretrained is not None and self.warm_start is not None and not self.random_init:
            raise ValueError(
                f"model.pretrained {self.pretrained} and model.warm_start {self.warm_start} both name weights: remove "
                "one, or set model.random_init to take only configuration and tokenizer from model.pretrained"
            )


@dataclass(frozen=True)
class TrainerConfig:
    """How long to train, and what to write.

    Args:
        output_dir: checkpoints, metrics, TensorBoard logs, packed tokens and the export; a run
            resumes from the checkpoint that it finds here. On several hosts it must be a shared
            directory.
        resume_from: the output directory of another run, or one of its checkpoints, which this
            run continues in its own ``output_dir``: nothing is written to the other directory. A
            run that has a checkpoint of its own continues from that.
        allow_changes: options that change the results and may differ from those of the checkpoint
            that a run resumes from, such as ``optimizer.lr``. The error that refuses a change says
            whether it can be allowed.
        on_schedule_change: what happens if ``max_steps`` differs from the checkpoint's and the
            decay of the learning rate ends there (``optimizer.decay_steps`` is ``None``):
            ``error``; ``keep``: the decay ends where it did, and the learning rate stays at its
            minimum; ``stretch``: the schedule ends at the new ``max_steps`` from this step on.
        max_steps: total number of optimizer steps, including the steps before a resume.
        max_epochs: passes over the text instead of ``max_steps``, such as 3 or 0.5; the steps are
            rounded up. It needs text that ``nxd-memopt prepare`` has tokenized with the same options:
            its length is not known before. -1, NeMo's default, is ``None``.
        seed: seed of the initial weights, of dropout and of the order of the data.
        val_check_interval: steps between held-out evaluations; 0 evaluates before and after only.
        save_interval: steps between checkpoints; 0 saves at the end only. ``auto`` saves by time,
            so that a killed run loses less than 30 minutes (docs/training.md).
        save_checkpoints: ``False`` writes no checkpoint at all, so the run cannot be resumed.
        async_save: write checkpoints in the background during training, one at a time; an error
            is reported at the next step. Needs host memory for everything that a rank writes
            (parameters, master weights, optimizer states); page-locked on GPUs.
        keep_checkpoints: number of newest checkpoints that stay on disk.
        log_every_n_steps: number of steps whose loss and gradient norm are read from the device
            together, written to metrics.jsonl and checked to be finite; also the steps between
            progress lines. Each read makes the host wait for the device, so use 10 or more on
            Trainium.
        export: write a Hugging Face directory at the end.
        verify_export: rank 0 loads the export with transformers and compares the held-out loss.
        enable_cuda_graph: run forward and backward of a micro-batch as one CUDA graph, on NVIDIA
            GPUs: one launch, so the host does not limit the speed if a rank has little work.
            ``auto`` does so unless the device, dropout or another option prevents it; the start
            report says which. ``true`` makes the same reasons errors.
        compile: ``layer`` compiles each decoder layer with torch.compile, as one graph of static
            shapes: the first step takes longer, later steps have fewer kernels. Inside a layer
            the compiler's kernels and collectives replace this library's (docs/gpus.md). Not
            supported on backend xla, which already compiles full steps, nor with dropout for
            which each tensor-parallel rank draws different numbers.
        precision: NeMo's name of the dtypes: ``32-true``, ``bf16-true``, ``bf16-mixed`` or
            ``16-mixed``; ``32``, ``bf16`` and ``16`` are short for ``32-true``, ``bf16-mixed`` and
            ``16-mixed``. ``None`` follows ``model.dtype`` and ``optimizer.master_weights``.
        allow_tf32: round the inputs of fp32 matmuls to TF32, which has 11 significant bits, on
            NVIDIA GPUs.
        distributed_timeout_minutes: how long a rank waits for the other ranks in a collective.
        wandb_project: project of Weights & Biases that receives options and metrics; ``None`` is
            none. ``WANDB_MODE=offline`` in the environment keeps them in ``output_dir``.
        auto_memory: the planner chooses the memory section when the run starts: the fastest
            techniques that fit the device. ``memory: auto`` in a YAML file sets it.
    """

    output_dir: str = "runs/train"
    resume_from: str | None = None
    allow_changes: tuple[str, ...] = ()
    on_schedule_change: Literal["error", "stretch", "keep"] = "error"
    max_steps: int = 100
    max_epochs: float | None = None
    seed: int = 1234
    val_check_interval: int = 0
    save_interval: int | Literal["auto"] = "auto"
    save_checkpoints: bool = True
    async_save: bool = False
    keep_checkpoints: int = 2
    log_every_n_steps: int = 1
    export: bool = True
    verify_export: bool = False
    enable_cuda_graph: bool | Literal["auto"] = "auto"
    compile: Literal["layer"] | None = None
    precision: int | str | None = None
    allow_tf32: bool = False
    distributed_timeout_minutes: int = 30
    wandb_project: str | None = None
    auto_memory: bool = False

    def __post_init__(self) -> None:
        for name in ("output_dir", "resume_from", "wandb_project"):
            require_named(f"trainer.{name}", getattr(self, name))
        if self.seed > MAX_SEED:
            raise ValueError(f"trainer.seed must be at most {MAX_SEED}, got {self.seed}")
        self._check_epochs()
        for name in ("max_steps", "seed", "val_check_interval"):
            require_at_least(f"trainer.{name}", getattr(self, name), 0)
        if self.save_interval != "auto":
            if type(self.save_interval) is not int:
                raise ValueError(f"trainer.save_interval must be auto or a number of steps, got {self.save_interval!r}")
            require_at_least("trainer.save_interval", self.save_interval, 0)
        for name in ("keep_checkpoints", "log_every_n_steps", "distributed_timeout_minutes"):
            require_at_least(f"trainer.{name}", getattr(self, name), 1)
        require_one_of("trainer.compile", self.compile, COMPILE)
        require_one_of("trainer.on_schedule_change", self.on_schedule_change, SCHEDULE_CHANGES)
        require_one_of("trainer.enable_cuda_graph", self.enable_cuda_graph, (True, False, "auto"))
        if self.verify_export and not self.export:
            raise ValueError("trainer.verify_export needs trainer.export: turn export on or verify_export off")

    def _check_epochs(self) -> None:
        """Replace -1 by None; raise ``ValueError`` for a number of epochs that is not positive and finite."""
        if self.max_epochs == -1:
            object.__setattr__(self, "max_epochs", None)
        if self.max_epochs is not None and not 0 < self.max_epochs < math.inf:
            raise ValueError(f"trainer.max_epochs must be above 0 and finite, got {self.max_epochs:g}; -1 is none")

    @property
    def checkpoint_directory(self) -> Path:
        """Directory of the run's training checkpoints."""
        return Path(self.output_dir) / "checkpoints"

    @property
    def tokens_directory(self) -> Path:
        """Directory of the packed tokens, which has one subdirectory per fingerprint."""
        return Path(self.output_dir) / "tokens"

    @property
    def export_directory(self) -> Path:
        """Directory of the run's Hugging Face export."""
        return Path(self.output_dir) / "export"


@dataclass(frozen=True)
class LaunchConfig:
    """What ``nxd-memopt launch`` puts into the ranks' environment.

    A run that is started in another way does not read this section.

    Args:
        neuron_cc_flags: options of trn1's compiler. With recompute the launcher adds ``-O1`` if
            no optimization level is given, and rejects any other level: the compiler could undo
            the recompute.
        compile_cache_dir: directory of the compilation cache on Trainium; ``None`` is the
            compiler's default, a directory on each host (trn1:
            ``/var/tmp/neuron-compile-cache``). ``{node_rank}`` is replaced by the host's number:
            trn1 hosts on a shared file system need one directory each. trn1 accepts an ``s3://``
            URL too.
    """

    neuron_cc_flags: tuple[str, ...] = ("--model-type=transformer",)
    compile_cache_dir: str | None = None

    def __post_init__(self) -> None:
        require_named("launch.compile_cache_dir", self.compile_cache_dir)


def _require_free_memory_section(memory: MemoryConfig) -> None:
    """Raise ``ValueError`` if the memory section has a technique, which ``memory: auto`` would replace."""
    allowed = MemoryConfig(
        attention_backend=memory.attention_backend, fused_linear_cross_entropy=memory.fused_linear_cross_entropy
    )
    given = {name: value for name, value in vars(memory).items() if value != getattr(allowed, name)}
    if given:
        raise ValueError(
            f"memory: auto (trainer.auto_memory) chooses the techniques, and the memory section has {given}: remove "
            "one of the two"
        )


@dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model with tensor and sequence parallelism.

    --config FILE.yaml sets any option below, by section; options on the command line come last
    and win.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    moe: MoEOptions = field(default_factory=MoEOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        # The options that state a precision or a ZeRO stage together are replaced by their common
        # meaning, so that everything else reads plain values.
        precision, dtype, masters = resolve_precision(
            self.trainer.precision, self.model.dtype, self.optimizer.master_weights
        )
        object.__setattr__(self, "trainer", replace(self.trainer, precision=precision))
        object.__setattr__(self, "model", replace(self.model, dtype=dtype))
        stage = resolve_sharding(self.data_parallel.sharding, self.optimizer.zero1)
        object.__setattr__(self, "data_parallel", replace(self.data_parallel, sharding=stage))
        object.__setattr__(self, "optimizer", replace(self.optimizer, master_weights=masters, zero1=None))
        if self.trainer.auto_memory:
            _require_free_memory_section(self.memory)
        require_compatible(
            self.data_parallel,
            overlap_grad_reduce=self.optimizer.overlap_grad_reduce,
            offloads_weights=self.memory.cpu_offloading_weights,
        )
        require_trainable_adapters(self.lora, self.memory, self.trainer.compile)
        if self.lora.lora_rank is not None and self.model.resize_embedding:
            raise ValueError(
                f"model.resize_embedding adds rows to the embedding, which adapters (lora.lora_rank "
                f"{self.lora.lora_rank}) neither train nor store: export the resized model with trainer.max_steps 0 "
                "first, without lora_rank, and train adapters of the export"
            )
        require_gradient_sums(self.data_parallel.grad_reduce_in_fp32, precision)
        require_updates_in_backward(stage, precision, in_backward=self.optimizer.in_backward)
        if self.optimizer.optimizer_cpu_offload:
            keeps_remainders = self.optimizer.store_param_remainders
            require_offloadable(self.data_parallel.stage, precision, keeps_remainders=keeps_remainders)
        # Checks between sections; each section has checked its own fields. Sequence parallelism
        # gives each tensor-parallel rank S / T tokens.
        if self.parallel.sequence_parallel_enabled:
            size = self.parallel.tensor_model_parallel_size
            require_divisible("data.seq_length", self.data.seq_length, "tensor_model_parallel_size", size)
        conflict = self.cuda_graph_conflict()
        if self.trainer.enable_cuda_graph is True and conflict is not None:
            raise ValueError(f"trainer.enable_cuda_graph is true and {conflict}, or enable_cuda_graph to false")
        if self.trainer.async_save and self.memory.cpu_offloading_weights:
            raise ValueError(
                "trainer.async_save copies weights during later steps, and memory.cpu_offloading_weights frees them: "
                "set one of them to false"
            )
        if self.optimizer.optimizer_update_in_forward and self.memory.cpu_offloading_weights:
            raise ValueError(
                "optimizer.optimizer_update_in_forward updates weights on the device during forward, and "
                "memory.cpu_offloading_weights keeps them on the host: set one of them to false"
            )
        self._check_schedule()
        require_expert_groups(self.parallel.expert_model_parallel_size, self.data_parallel)
        if self.trainer.verify_export and not self.data.eval_sequences:
            raise ValueError("trainer.verify_export compares held-out losses: set data.eval_sequences above 0")
        if self.trainer.resume_from is not None and self.model.warm_start is not None:
            raise ValueError(
                f"trainer.resume_from {self.trainer.resume_from} and model.warm_start {self.model.warm_start} are "
                "both set: resume_from continues a run, warm_start takes its weights only: remove one"
            )

    def _check_schedule(self) -> None:
        """Raise ``ValueError`` for a schedule longer than the run, and for epochs of several sources."""
        if self.trainer.max_epochs is not None and self.data.mixture:
            raise ValueError(
                f"trainer.max_epochs {self.trainer.max_epochs:g} and data.mixture are both given, and its sources end "
                "at different steps: set trainer.max_steps instead"
            )
        # A run of 0 steps, which evaluates and exports only, has no schedule; the steps of a
        # run of epochs are not known yet (``epochs.py``).
        optimizer = self.optimizer
        has_steps = self.trainer.max_steps and self.trainer.max_epochs is None
        if has_steps and optimizer.constant_steps >= self.trainer.max_steps:
            raise ValueError(
                f"optimizer.constant_steps {optimizer.constant_steps} leave none of trainer.max_steps "
                f"{self.trainer.max_steps} for the decay: lower constant_steps, which a shorter run of the same file "
                "needs too, or raise max_steps"
            )
        if has_steps and optimizer.warmup_steps + optimizer.wsd_decay_steps > self.decay_steps:
            if optimizer.wsd_decay_steps:
                raise ValueError(
                    f"optimizer.warmup_steps {optimizer.warmup_steps} and wsd_decay_steps {optimizer.wsd_decay_steps} "
                    f"together exceed the schedule of {self.decay_steps} steps: shorten one of them"
                )
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} is beyond the last step of the schedule, "
                f"{self.decay_steps} (optimizer.decay_steps, or trainer.max_steps without constant_steps): the "
                "learning rate would never reach optimizer.lr; shorten warmup_steps or set decay_steps"
            )

    def cuda_graph_conflict(self) -> str | None:
        """Return which option excludes CUDA graphs and how to change it, or None."""
        # A graph replays forward and backward as one launch, without Python in between: nothing
        # that runs Python code in backward (hooks, offloading) can be combined with it.
        if self.optimizer.overlap_grad_reduce:
            return (
                "optimizer.overlap_grad_reduce is true, but a graph computes all gradients "
                "before any is reduced: set overlap_grad_reduce to false"
            )
        stage = self.data_parallel.stage
        if stage in SHARDS_GRADIENTS:
            return (
                f"data_parallel.sharding is {stage}, but it reduces and frees gradients between "
                "kernels, and a graph has no host code: set data_parallel.sharding to zero1"
            )
        if self.optimizer.optimizer_update_in_forward:
            return (
                "optimizer.optimizer_update_in_forward is true, but the updates run between the "
                "layers' kernels, and a graph has no host code: set optimizer_update_in_forward to false"
            )
        if self.optimizer.in_backward:
            return (
                "optimizer.in_backward is true, but a graph computes all gradients before any is "
                "used: set in_backward to false"
            )
        if self.memory.cpu_offloading_activations or self.memory.cpu_offloading_num_layers:
            name = "cpu_offloading_num_layers"
            remedy = f"set {name} to 0"
            if self.memory.cpu_offloading_activations:
                name = "cpu_offloading_activations"
                remedy = f"set {name} to false"
            return (
                f"memory.{name} is {getattr(self.memory, name)}, but the host starts the copies "
                f"between kernels, and a graph has no host code: {remedy}"
            )
        if self.lora.lora_rank is not None:
            return (
                f"lora.lora_rank is {self.lora.lora_rank}, and graphs of adapters are not supported: set lora_rank to "
                "null"
            )
        if self.trainer.compile:
            return (
                f"trainer.compile is {self.trainer.compile!r}, and graphs of compiled layers are "
                "not supported: set compile to null"
            )
        return None

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        if self.optimizer.decay_steps is None:
            return self.trainer.max_steps - self.optimizer.constant_steps
        return self.optimizer.decay_steps

    def data_parallel_size(self, world_size: int) -> int:
        """Return D = world size / T, the number of model replicas that share a step's sequences.

        Raises:
            ValueError: when the tensor-parallel size does not divide the world size.
        """
        size = self.parallel.tensor_model_parallel_size
        remedy = f"start a multiple of {size} ranks, such as nxd-memopt train --nproc {size}"
        return require_divisible("world size", world_size, "tensor_model_parallel_size", size, remedy)

    def require_expert_ranks(self, world_size: int) -> None:
        """Raise ``ValueError`` unless the data-parallel ranks are groups of EP ranks."""
        size = self.parallel.expert_model_parallel_size
        remedy = f"start a multiple of {size * self.parallel.tensor_model_parallel_size} ranks, or lower it"
        replicas = self.data_parallel_size(world_size)
        require_divisible("data-parallel size", replicas, "parallel.expert_model_parallel_size", size, remedy)

    def accumulation_steps(self, world_size: int) -> int:
        """Return the micro-batches per optimizer step on each rank: global batch / (B * D).

        Raises:
            ValueError: the global batch size is not a multiple of B * D, or T does not divide the
                world size.
        """
        replicas = self.data_parallel_size(world_size)
        # The divisor's name shows how it was computed: "... B x data-parallel size D = B * D".
        sequences_per_pass = self.data.micro_batch_size * replicas
        by = f"data.micro_batch_size {self.data.micro_batch_size} x data-parallel size {replicas} ="
        steps = require_divisible(
            "data.global_batch_size",
            self.data.global_batch_size,
            by,
            sequences_per_pass,
        )
        if self.optimizer.in_backward and steps > 1:
            raise ValueError(
                f"optimizer.in_backward updates in each backward, and data.global_batch_size "
                f"{self.data.global_batch_size} is {steps} micro-batches of {sequences_per_pass} sequences: set "
                f"global_batch_size to {sequences_per_pass}, a larger micro_batch_size, or in_backward to false"
            )
        return steps
