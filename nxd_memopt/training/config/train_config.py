"""The training program's configuration: one frozen, self-validating dataclass per section of the YAML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nxd_memopt.config import MemoryConfig, ParallelConfig, require_divisible
from nxd_memopt.options import Resume, check_options, field_types, option, require_named, require_one_of
from nxd_memopt.planner.sizes.fp8_layers import Fp8Layers, rounded_layers
from nxd_memopt.training.config.combinations import conflict_with_graphs, require_compatible
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.data_parallel import DataParallelConfig
from nxd_memopt.training.config.lora import LoraOptions
from nxd_memopt.training.config.moe import MoEOptions
from nxd_memopt.training.config.optimizer import OptimizerConfig
from nxd_memopt.training.config.precision import PRECISIONS, precision_name

RECIPES = Path(__file__).parents[1] / "recipes"
SHORT_WARMUP = 0.1  # of the steps of a run that is too short for optimizer.warmup_steps
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
    """

    # A checkpoint has the weights, so a pretrained directory stands for its configuration and its
    # tokenizer only when a run resumes. Sizes and everything else in config.json are compared one by one.
    pretrained: str | None = option(None, resume=Resume.SAME_CONFIG, is_path=True)
    tokenizer: str | None = option(None, resume=Resume.SAME_CONTENT, is_path=True)
    config_overrides: dict[str, Any] = option(factory=dict, resume=Resume.SPECIAL)
    random_init: bool = option(False, resume=Resume.NOT_COMPARED)
    # vocab_size, which follows from it, is compared.
    resize_embedding: bool = option(False, resume=Resume.NOT_COMPARED)
    warm_start: str | None = option(None, resume=Resume.NOT_COMPARED, is_path=True)

    def __post_init__(self) -> None:
        check_options(self, "model")
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
        allow_changes: options that change the results and may differ from the options of the checkpoint
            that a run resumes from, such as ``optimizer.lr``. The error that refuses a change says
            whether it can be allowed.
        max_steps: total number of optimizer steps, including the steps before a resume.
        max_epochs: passes over the text instead of ``max_steps``, such as 3 or 0.5; the steps are
            rounded up. It needs text that ``nxd-memopt prepare`` has tokenized with the same options:
            its length is not known before. -1, NeMo's default, is ``None``.
        seed: seed of the initial weights, of dropout and of the order of the data.
        val_check_interval: steps between held-out evaluations; 0 evaluates before and after only.
        save_interval: steps between checkpoints; 0 saves at the end only. ``auto`` saves by time,
            so that a killed run loses less than 30 minutes (docs/training.md). ``never`` writes no
            checkpoint at all, so the run cannot be resumed.
        async_save: write checkpoints in the background during training, one at a time; an error
            is reported at the next step. Needs host memory for everything that a rank writes
            (parameters, master weights, optimizer states); page-locked on GPUs.
        keep_checkpoints: number of newest checkpoints that stay on disk.
        keep_best: save after each evaluation with a lower held-out loss than all before, and keep the checkpoint
            with the lowest one next to the newest ones. It needs ``val_check_interval``.
        log_every_n_steps: number of steps whose loss and gradient norm are read from the device
            together, written to metrics.jsonl and checked to be finite; also the steps between
            progress lines. Each read makes the host wait for the device, so use 10 or more on
            Trainium.
        export: write a Hugging Face directory at the end; with ``verify`` rank 0 loads it with transformers
            and compares the held-out loss.
        enable_cuda_graph: run forward and backward of a micro-batch as one CUDA graph, on NVIDIA
            GPUs: one launch, so the host does not limit the speed if a rank has little work.
            ``auto`` does so unless the device, dropout or another option prevents it; the start
            report says which. ``true`` makes the same reasons errors.
        compile: ``layer`` compiles each decoder layer with torch.compile, as one graph of static
            shapes: the first step takes longer, later steps have fewer kernels. Inside a layer
            the compiler's kernels and collectives replace this library's (docs/gpus.md). Not
            supported on backend xla, which already compiles full steps, nor with dropout for
            which each tensor-parallel rank draws different numbers.
        precision: NeMo's name of the dtypes of parameters, and of gradients and optimizer states: ``32-true``
            is fp32; ``bf16-mixed`` keeps bf16 parameters and fp32 master weights, optimizer states and gradient
            sums, 18 bytes per parameter; ``16-mixed`` the same with fp16 parameters and a scaled loss;
            ``bf16-true`` keeps everything in bf16, 8 bytes per parameter, and loses updates smaller than a
            weight's rounding step, unless the device rounds stochastically (on Trainium the launcher turns that
            on). ``32``, ``bf16`` and ``16`` are short for ``32-true``, ``bf16-mixed`` and ``16-mixed``.
        fp8: round the operands of the matmuls of decoder layers to float8 in training, on NVIDIA GPUs of compute
            capability 9.0 or higher (docs/precision.md): ``hybrid`` rounds gradients to e5m2, ``e4m3`` as
            weights and activations to e4m3.
        fp8_recipe: numbers that share a scale: a tensor (``tensorwise``), or a row of an operand
            (``rowwise``), 4 % slower and more exact where few values are large.
        first_last_layers_bf16: number of decoder layers at each end that ``fp8`` leaves as they are.
        allow_tf32: round the inputs of fp32 matmuls to TF32, which has 11 significant bits, on
            NVIDIA GPUs.
        distributed_timeout_minutes: how long a rank waits for the other ranks in a collective.
        wandb_project: project of Weights & Biases that receives options and metrics; ``None`` is
            none. ``WANDB_MODE=offline`` in the environment keeps them in ``output_dir``.
    """

    output_dir: str = option("runs/train", resume=Resume.NOT_COMPARED, is_path=True)
    resume_from: str | None = option(None, resume=Resume.NOT_COMPARED, is_path=True)
    allow_changes: tuple[str, ...] = option((), resume=Resume.NOT_COMPARED)
    max_steps: int = option(100, resume=Resume.REPORTED, minimum=0)
    max_epochs: float | None = option(None, resume=Resume.NOT_COMPARED, above=0)  # max_steps follows from it
    seed: int = option(1234, resume=Resume.REFUSED, minimum=0, maximum=MAX_SEED)
    val_check_interval: int = option(0, resume=Resume.REPORTED, minimum=0)
    save_interval: int | Literal["auto", "never"] = option("auto", resume=Resume.REPORTED, minimum=0)
    async_save: bool = option(False, resume=Resume.REPORTED)
    keep_checkpoints: int = option(2, resume=Resume.REPORTED, minimum=1)
    keep_best: bool = option(False, resume=Resume.REPORTED)
    log_every_n_steps: int = option(1, resume=Resume.REPORTED, minimum=1)
    export: bool | Literal["verify"] = option(True, resume=Resume.REPORTED)
    enable_cuda_graph: bool | Literal["auto"] = option("auto", resume=Resume.REPORTED)
    compile: Literal["layer"] | None = option(None, resume=Resume.REPORTED)
    precision: str | int = option("32-true", resume=Resume.REFUSED, nemo=["precision"])
    fp8: Literal["hybrid", "e4m3"] | None = option(None, resume=Resume.WHEN_ASKED)
    fp8_recipe: Literal["tensorwise", "rowwise"] = option("tensorwise", resume=Resume.WHEN_ASKED)
    first_last_layers_bf16: int = option(0, resume=Resume.WHEN_ASKED, minimum=0)
    allow_tf32: bool = option(False, resume=Resume.WHEN_ASKED)
    distributed_timeout_minutes: int = option(30, resume=Resume.NOT_COMPARED, minimum=1)
    wandb_project: str | None = option(None, resume=Resume.NOT_COMPARED)

    def __post_init__(self) -> None:
        # NeMo's and Lightning's way to say that steps end the run.
        if self.max_epochs == -1:
            object.__setattr__(self, "max_epochs", None)
        check_options(self, "trainer")
        require_named("trainer.wandb_project", self.wandb_project)
        object.__setattr__(self, "precision", precision_name(self.precision))
        require_one_of("trainer.precision", self.precision, tuple(PRECISIONS))

    @property
    def saves_checkpoints(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.save_interval != "never"

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


def _require_free_memory_section(memory: MemoryConfig) -> None:
    """Raise ``ValueError`` if the memory section has a technique, which ``memory: auto`` would replace."""
    allowed = MemoryConfig(
        attention_backend=memory.attention_backend, fused_linear_cross_entropy=memory.fused_linear_cross_entropy
    )
    given = {name: value for name, value in vars(memory).items() if value != getattr(allowed, name)}
    if given:
        raise ValueError(
            f"memory: auto chooses the techniques, and the memory section has {given}: remove one of the two"
        )


@dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model with tensor and sequence parallelism.

    --config FILE.yaml sets any option below, by section; options on the command line come last
    and win.

    Args:
        auto_memory: the planner chooses the memory section when the run starts: the fastest techniques that fit the
            device. ``memory: auto`` in a YAML file, and ``--memory auto`` on the command line, set it.
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
    auto_memory: bool = False

    def __post_init__(self) -> None:
        # Each section has checked its own options.
        if self.auto_memory:
            _require_free_memory_section(self.memory)
            if self.parallel.pipeline_model_parallel_size > 1:
                raise ValueError(
                    "memory: auto plans complete models, and parallel.pipeline_model_parallel_size is "
                    f"{self.parallel.pipeline_model_parallel_size}: choose the techniques in the memory section"
                )
        require_compatible(self)
        conflict = conflict_with_graphs(self)
        if self.trainer.enable_cuda_graph is True and conflict is not None:
            raise ValueError(f"trainer.enable_cuda_graph is true and {conflict}; change one of the two")
        # Sequence parallelism gives each tensor-parallel rank S / T tokens.
        if self.parallel.sequence_parallel_enabled:
            size = self.parallel.tensor_model_parallel_size
            require_divisible("data.seq_length", self.data.seq_length, "tensor_model_parallel_size", size)
        self._check_schedule()
        # The shards of part of the data-parallel ranks are of parameters that all of them have.
        # "hosts" are counted when the run starts.
        expert_ranks = self.parallel.expert_model_parallel_size
        instances = self.data_parallel.num_distributed_optimizer_instances
        if expert_ranks > 1 and instances not in (1, "hosts"):
            raise ValueError(
                f"parallel.expert_model_parallel_size {expert_ranks} and "
                f"data_parallel.num_distributed_optimizer_instances {instances}: the experts' ranks would be divided "
                "too; leave the instances out, or set expert_model_parallel_size to 1"
            )

    def fp8_layers(self, num_layers: int) -> Fp8Layers | None:
        """Return which of ``num_layers`` decoder layers round to float8; None without ``trainer.fp8``.

        Raises:
            ValueError: ``first_last_layers_bf16`` leaves no layer.
        """
        trainer = self.trainer
        if trainer.fp8 is None:
            return None
        layers = Fp8Layers(rounded_layers(trainer.first_last_layers_bf16, num_layers), trainer.fp8_recipe == "rowwise")
        if self.lora.base_dtype is None:
            return layers
        return replace(layers, least_products=0, stores_weights=True)

    @property
    def dtype(self) -> str:
        """Dtype of parameters and activations."""
        return PRECISIONS[str(self.trainer.precision)].dtype

    @property
    def master_weights(self) -> bool:
        """Whether the optimizer keeps fp32 weights, states and gradient sums."""
        return PRECISIONS[str(self.trainer.precision)].master_weights

    def _check_schedule(self) -> None:
        """Raise ``ValueError`` for a schedule that is longer than the run."""
        # A run of 0 steps, which evaluates and exports only, has no schedule; the steps of a
        # run of epochs are not known yet (``epochs.py``).
        if not self.trainer.max_steps or self.trainer.max_epochs is not None:
            return
        warmup, decay = self.warmup_steps, self.optimizer.wsd_decay_steps
        if warmup + decay > self.decay_steps:
            steps = f"optimizer.warmup_steps {warmup}"
            if decay:
                steps += f" and wsd_decay_steps {decay} together"
            raise ValueError(
                f"{steps} exceed the schedule of {self.decay_steps} steps (optimizer.decay_steps, else "
                "trainer.max_steps): the learning rate would never reach optimizer.lr; shorten one of them or set "
                "decay_steps"
            )

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up: ``optimizer.warmup_steps``, or a tenth of a run that is too short for them.

        A few steps that try the configuration of a long run then have a peak and a decay too. With ``decay_steps``
        the schedule is stated, and a longer warm-up is an error.
        """
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.wsd_decay_steps
        if self.optimizer.decay_steps is not None or warmup + decay <= self.trainer.max_steps:
            return warmup
        return min(warmup, max(1, int(SHORT_WARMUP * self.trainer.max_steps)))

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        if self.optimizer.decay_steps is None:
            return self.trainer.max_steps
        return self.optimizer.decay_steps

    def data_parallel_size(self, world_size: int) -> int:
        """Return D = world size / (T * P), the number of model replicas that share a step's sequences.

        Raises:
            ValueError: when the ranks of a replica do not divide the world size.
        """
        size = self.parallel.ranks_of_replica
        name = "tensor_model_parallel_size"
        if self.parallel.pipeline_model_parallel_size > 1:
            name += " x pipeline_model_parallel_size"
        remedy = f"start a multiple of {size} ranks, such as nxd-memopt train --nproc {size}"
        return require_divisible("world size", world_size, name, size, remedy)

    def require_expert_ranks(self, world_size: int) -> None:
        """Raise ``ValueError`` unless the data-parallel ranks are groups of EP ranks."""
        size = self.parallel.expert_model_parallel_size
        remedy = f"start a multiple of {size * self.parallel.ranks_of_replica} ranks, or lower it"
        replicas = self.data_parallel_size(world_size)
        require_divisible("data-parallel size", replicas, "parallel.expert_model_parallel_size", size, remedy)

    def accumulation_steps(self, world_size: int) -> int:
        """Return the micro-batches per optimizer step on each rank: global batch / (B * D).

        Raises:
            ValueError: the global batch size is not a multiple of B * D, or T does not divide the
                world size.
        """
        replicas = self.data_parallel_size(world_size)
        steps = self.data.accumulation_steps(replicas)
        if self.optimizer.in_backward and steps > 1:
            size = self.data.global_batch_size // steps
            raise ValueError(
                f"optimizer.in_backward updates in each backward, and data.global_batch_size "
                f"{self.data.global_batch_size} is {steps} micro-batches of {size} sequences: set global_batch_size "
                f"to {size}, a larger micro_batch_size, or in_backward to false"
            )
        if self.parallel.num_chunks > 1:
            stages = self.parallel.pipeline_model_parallel_size
            name = "micro-batches of a step (data.global_batch_size / micro_batch_size / data-parallel ranks)"
            remedy = "change data.global_batch_size, or leave virtual_pipeline_model_parallel_size out"
            require_divisible(name, steps, "parallel.pipeline_model_parallel_size", stages, remedy)
        return steps


SECTIONS: dict[str, Any] = {
    name: cls for name, cls in field_types(TrainConfig).items() if dataclasses.is_dataclass(cls)
}
"""Section of a configuration file -> its options."""
