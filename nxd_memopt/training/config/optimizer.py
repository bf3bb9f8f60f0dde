"""The ``optimizer`` section of the configuration: AdamW, its schedule, and where its states are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nxd_memopt.config import require_at_least, require_one_of
from nxd_memopt.training.config.precision import MAX_LOSS_SCALE

LR_SCHEDULES = ("cosine", "linear", "wsd", "constant", "inverse_sqrt")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a decay.

    Args:
        lr: peak learning rate.
        lr_schedule: what follows the warm-up: a ``cosine`` or ``linear`` decay; ``wsd`` (warm-up,
            stable, decay) stays at ``lr`` and decays linearly in the last ``wsd_decay_steps``;
            ``constant`` stays at ``lr``; ``inverse_sqrt`` falls with the square root of the step.
        wsd_decay_steps: steps of the decay of ``wsd``.
        min_lr_ratio: the learning rate ends at this fraction of ``lr``.
        warmup_steps: steps of linear warm-up.
        decay_steps: step at which the decay ends; ``None`` takes ``trainer.max_steps``. Set it if
            ``max_steps`` will be raised later, or choose with ``trainer.on_schedule_change`` then.
        constant_steps: last steps at the minimum: the decay ends that many steps before
            ``trainer.max_steps`` (NeMo's name).
        weight_decay: for parameters of two or more dimensions; norms and biases are not decayed.
        no_decay: patterns of names of parameters without weight decay, such as ``[embed_tokens]``. A
            pattern matches a part of a name; ``*`` and ``?`` are those of a shell. One that matches
            nothing is an error.
        do_layer_norm_weight_decay: decay norms and biases too (NeMo's name).
        lr_multipliers: factors of the learning rate for parameters whose names a pattern matches,
            such as ``{lm_head: 0.1}``.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        clip_grad: maximum global gradient norm; 0 disables clipping.
        master_weights: keep fp32 weights, optimizer states and gradient sums for bf16 and fp16
            parameters, 18 bytes per parameter in total; False keeps everything in bf16, 8 bytes
            per parameter, and loses updates smaller than a weight's rounding step, unless the
            device rounds stochastically (on Trainium the launcher turns that on). ``None`` follows
            ``trainer.precision``, and is True without it.
        zero1: True is ``data_parallel.sharding: zero1`` and False ``none``; Megatron's
            ``use_distributed_optimizer``.
        overlap_grad_reduce: overlap the gradient reduction over ranks with backward, instead of
            running it afterwards.
        in_backward: update each parameter in backward, as soon as its gradient is complete, and free
            the gradient. The results are those of an update after backward. Excludes what needs all
            gradients at once: clipping, several micro-batches per step, master weights, ZeRO,
            ``overlap_grad_reduce``, offloaded states and CUDA graphs.
        optimizer_cpu_offload: keep fp32 master weights and optimizer states in host memory between
            steps, on NVIDIA GPUs; they pass through the device in each update (Megatron's name). The
            results are the same at every fraction. Needs ``master_weights`` or fp32 parameters, and
            ``data_parallel.sharding`` none or zero1.
        optimizer_offload_fraction: part of them that is on the host, from 0 to 1; ``None`` is 1.
        optimizer_staging_gib: device memory for states on their way, in GiB of 2^30 bytes. With more
            of it, more of the next step's states arrive during forward and backward.
        optimizer_update_in_forward: each layer's update runs right before the layer's next forward,
            so that the states of later layers arrive while earlier layers run. The results are the
            same. Gradients stay allocated until then. Needs parameters that are not sharded.
        store_param_remainders: of offloaded masters, keep only the 16 bits that the bf16 parameters lack
            (Megatron's name): 10 bytes per parameter instead of 12 on the host and on the link. The
            results are the same, but for a master halfway between two bf16 numbers, which may lose its
            last bit, and for code that writes to parameters between steps, which rounds them.
            Checkpoints resume with and without it. Needs bf16 parameters.
        initial_loss_scale: 16-mixed: first factor of the loss; NeMo's ``native_amp_init_scale``.
        min_loss_scale: 16-mixed: the scale is not lowered below this; 20 consecutive steps with
            overflow at this scale stop the run.
        loss_scale_window: 16-mixed: consecutive steps without overflow after which the scale is
            doubled; NeMo's ``native_amp_growth_interval``.
        hysteresis: 16-mixed: overflows before the scale is halved.
    """

    lr: float = 3e-4
    lr_schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = "cosine"
    wsd_decay_steps: int = 0
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    decay_steps: int | None = None
    constant_steps: int = 0
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ()
    do_layer_norm_weight_decay: bool = False
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    master_weights: bool | None = None
    zero1: bool | None = None
    overlap_grad_reduce: bool = False
    in_backward: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float | None = None
    optimizer_staging_gib: float = 2.0
    optimizer_update_in_forward: bool = False
    store_param_remainders: bool = False
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        for name in ("lr", "warmup_steps", "weight_decay", "eps", "clip_grad", "min_lr_ratio"):
            require_at_least(f"optimizer.{name}", getattr(self, name), 0)
        # A row of the embedding without a gradient would be divided 0 by 0.
        if self.eps == 0:
            raise ValueError("optimizer.eps must be above 0, got 0: AdamW divides by it; the default is 1e-8")
        require_one_of("optimizer.lr_schedule", self.lr_schedule, LR_SCHEDULES)
        self._check_schedule()
        for name in ("loss_scale_window", "hysteresis"):
            require_at_least(f"optimizer.{name}", getattr(self, name), 1)
        if not 0 < self.min_loss_scale <= self.initial_loss_scale <= MAX_LOSS_SCALE:
            raise ValueError(
                f"optimizer.min_loss_scale {self.min_loss_scale} and optimizer.initial_loss_scale "
                f"{self.initial_loss_scale} must be above 0 and at most {MAX_LOSS_SCALE:.0e}, and "
                "initial_loss_scale not below min_loss_scale"
            )
        self._check_groups()
        self._check_in_backward()
        self._check_offload()
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio must be at most 1, got {self.min_lr_ratio}")
        # AdamW divides by 1 - beta**step, which is 0 for beta 1.
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")

    @property
    def has_end(self) -> bool:
        """Whether the learning rate depends on the step at which its decay ends."""
        return self.lr_schedule not in ("constant", "inverse_sqrt")

    def _check_schedule(self) -> None:
        """Raise ``ValueError`` for options that the schedule does not read, or needs."""
        if self.lr_schedule == "wsd":
            require_at_least("optimizer.wsd_decay_steps", self.wsd_decay_steps, 1)
        elif self.wsd_decay_steps:
            raise ValueError(
                f"optimizer.wsd_decay_steps {self.wsd_decay_steps} is for optimizer.lr_schedule wsd, which is "
                f"{self.lr_schedule}: leave one of them out"
            )
        require_at_least("optimizer.constant_steps", self.constant_steps, 0)
        if self.constant_steps and self.decay_steps is not None:
            raise ValueError(
                f"optimizer.constant_steps {self.constant_steps} and decay_steps {self.decay_steps} both say where the "
                "decay ends: leave one of them out"
            )
        for name, is_given in (("decay_steps", self.decay_steps is not None), ("constant_steps", self.constant_steps)):
            if is_given and not self.has_end:
                raise ValueError(
                    f"optimizer.{name} {getattr(self, name)} has no effect with lr_schedule {self.lr_schedule}: "
                    "leave it out"
                )

    def _check_groups(self) -> None:
        """Raise ``ValueError`` for patterns and factors that cannot be of a parameter."""
        for option, patterns in (("no_decay", self.no_decay), ("lr_multipliers", tuple(self.lr_multipliers))):
            for pattern in patterns:
                if not isinstance(pattern, str) or not pattern.strip("* "):
                    raise ValueError(
                        f"optimizer.{option} has the pattern {pattern!r}, which names no parameter: write a part of a "
                        "name, such as embed_tokens"
                    )
        for pattern, factor in self.lr_multipliers.items():
            if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < math.inf:
                raise ValueError(
                    f"optimizer.lr_multipliers {pattern!r} must be a number above 0, got {factor!r}: it multiplies lr"
                )

    def _check_in_backward(self) -> None:
        """Raise ``ValueError`` for an option of this section that an update in backward excludes."""
        if not self.in_backward:
            return
        if self.clip_grad > 0:
            raise ValueError(
                f"optimizer.in_backward is true and optimizer.clip_grad is {self.clip_grad}: a parameter is updated "
                "before the norm of all gradients is known: set clip_grad to 0, or in_backward to false"
            )
        for name in ("overlap_grad_reduce", "optimizer_cpu_offload"):
            if getattr(self, name):
                raise ValueError(
                    f"optimizer.in_backward and optimizer.{name} are true, and each of them decides when a gradient "
                    "is used: set one of them to false"
                )

    def _check_offload(self) -> None:
        fraction = self.optimizer_offload_fraction
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"optimizer.optimizer_offload_fraction must be between 0 and 1, got {fraction}")
        require_at_least("optimizer.optimizer_staging_gib", self.optimizer_staging_gib, 0)
        if self.optimizer_cpu_offload:
            return
        # Options of the offload that nothing would read.
        for name in (
            "optimizer_offload_fraction",
            "optimizer_staging_gib",
            "optimizer_update_in_forward",
            "store_param_remainders",
        ):
            if getattr(self, name) != getattr(OptimizerConfig, name):
                raise ValueError(
                    f"optimizer.{name} {getattr(self, name)} needs optimizer.optimizer_cpu_offload: set it to true, "
                    f"or leave {name} out"
                )
