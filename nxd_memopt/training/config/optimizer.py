"""The ``optimizer`` section of the configuration: AdamW, its schedule, and where its states are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxd_memopt.options import Resume, check_options, option, require_at_least

# Equal to optimizer.loss_scaler.MAX_SCALE, which cannot be read without torch.
MAX_LOSS_SCALE = 2.0**96


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
        warmup_steps: steps of linear warm-up. If they exceed ``trainer.max_steps`` and ``decay_steps`` is not
            set, a tenth of ``max_steps``: the run says so.
        decay_steps: step at which the decay ends; ``None`` takes ``trainer.max_steps``. Set it if
            ``max_steps`` will be raised later.
        weight_decay: for parameters of two or more dimensions; norms and biases are not decayed.
        no_decay: patterns of names of parameters without weight decay, such as ``[embed_tokens]``. A
            pattern matches a part of a name; ``*`` and ``?`` match as in a shell. One that matches
            nothing is an error.
        do_layer_norm_weight_decay: decay norms and biases too (NeMo's name).
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        clip_grad: maximum global gradient norm; 0 disables clipping.
        overlap_grad_reduce: overlap the gradient reduction over ranks with backward, instead of
            running it afterwards.
        in_backward: update each parameter in backward, as soon as its gradient is complete, and free
            the gradient. The results equal an update after backward. Excludes what needs all
            gradients at once: clipping, several micro-batches per step, master weights, ZeRO,
            ``overlap_grad_reduce``, offloaded states and CUDA graphs.
        optimizer_offload_fraction: part of the fp32 master weights and optimizer states that is in host
            memory between steps, on NVIDIA GPUs, from 0 to 1 (Megatron's name); they pass through the device
            in each update. The results are the same at every fraction. Needs fp32 master weights or
            parameters, and ``data_parallel.sharding`` none or zero1.
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
        initial_loss_scale: first factor of the loss with ``trainer.precision`` 16-mixed. An overflow skips
            a step; the second one and each further one halve the scale, and 1,000 steps without double it.
    """

    lr: float = option(3e-4, resume=Resume.WHEN_ASKED, minimum=0)
    lr_schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = option(
        "cosine", resume=Resume.WHEN_ASKED
    )
    wsd_decay_steps: int = option(0, resume=Resume.WHEN_ASKED, minimum=0)
    min_lr_ratio: float = option(0.1, resume=Resume.WHEN_ASKED, minimum=0, maximum=1)
    warmup_steps: int = option(0, resume=Resume.WHEN_ASKED, minimum=0)
    decay_steps: int | None = option(None, resume=Resume.SPECIAL)
    weight_decay: float = option(0.1, resume=Resume.WHEN_ASKED, minimum=0)
    # Checkpoints have the states by group of parameters.
    no_decay: tuple[str, ...] = option((), resume=Resume.REFUSED)
    do_layer_norm_weight_decay: bool = option(False, resume=Resume.REFUSED, nemo=["do_layer_norm_weight_decay"])
    betas: tuple[float, ...] = option((0.9, 0.95), resume=Resume.WHEN_ASKED)
    # AdamW divides by it: a row of the embedding without a gradient would be divided 0 by 0.
    eps: float = option(1e-8, resume=Resume.WHEN_ASKED, above=0)
    clip_grad: float = option(1.0, resume=Resume.WHEN_ASKED, minimum=0, nemo=["gradient_clip_val"])
    overlap_grad_reduce: bool = option(False, resume=Resume.REPORTED)
    in_backward: bool = option(False, resume=Resume.REPORTED)
    optimizer_offload_fraction: float = option(
        0.0, resume=Resume.REPORTED, minimum=0, maximum=1, nemo=["optimizer_offload_fraction"]
    )
    optimizer_staging_gib: float = option(2.0, resume=Resume.REPORTED, minimum=0)
    optimizer_update_in_forward: bool = option(False, resume=Resume.REPORTED)
    store_param_remainders: bool = option(False, resume=Resume.REPORTED)
    initial_loss_scale: float = option(
        2.0**32, resume=Resume.REPORTED, minimum=1, maximum=MAX_LOSS_SCALE, nemo=["native_amp_init_scale"]
    )

    def __post_init__(self) -> None:
        check_options(self, "optimizer")
        self._check_schedule()
        self._check_groups()
        self._check_in_backward()
        self._check_offload()
        # AdamW divides by 1 - beta**step, which is 0 for beta 1.
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {list(self.betas)}")

    @property
    def offloads_states(self) -> bool:
        """Whether a part of the optimizer's states is in host memory."""
        return self.optimizer_offload_fraction > 0

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
        if self.decay_steps is not None and not self.has_end:
            raise ValueError(
                f"optimizer.decay_steps {self.decay_steps} has no effect with lr_schedule {self.lr_schedule}: "
                "leave it out"
            )

    def _check_groups(self) -> None:
        """Raise ``ValueError`` for a pattern that cannot be of a parameter."""
        for pattern in self.no_decay:
            if not pattern.strip("* "):
                raise ValueError(
                    f"optimizer.no_decay has the pattern {pattern!r}, which names no parameter: write a part of a "
                    "name, such as embed_tokens"
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
        for name in ("overlap_grad_reduce", "optimizer_offload_fraction"):
            if getattr(self, name):
                raise ValueError(
                    f"optimizer.in_backward is true and optimizer.{name} is {getattr(self, name)}, and each of them "
                    f"decides when a gradient is used: leave one of them out"
                )

    def _check_offload(self) -> None:
        if self.offloads_states:
            return
        # Options of the offload that nothing would read.
        for name in ("optimizer_staging_gib", "optimizer_update_in_forward", "store_param_remainders"):
            if getattr(self, name) != getattr(OptimizerConfig, name):
                raise ValueError(
                    f"optimizer.{name} {getattr(self, name)} needs optimizer.optimizer_offload_fraction above 0: set "
                    f"it, or leave {name} out"
                )
