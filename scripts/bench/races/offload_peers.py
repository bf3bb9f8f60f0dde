"""The peers of ``state_offload``: FSDP2 and DeepSpeed with optimizer states on the host, and peers without offload."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nxd_memopt._optional import installed
from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from scripts.bench.races.peers import Builder, LossFunction, build_hf, build_liger, dtype, with_flash4

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01  # torch's default, which is not DeepSpeed's
MAX_NORM = 1.0


class Stepper(Protocol):
    """Optimizer of a peer, which clips the gradients by their global norm."""

    def step(self) -> None:
        """Clip the gradients and update the weights."""
        ...

    def zero_grad(self) -> None:
        """Free the gradients."""
        ...

    def norm(self) -> float:
        """Return the global norm of the last step, before clipping."""
        ...


class ClippedAdamW:
    """torch's fused AdamW, whose ``step`` clips the gradients first."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        self._norm = torch.zeros(())

    def step(self) -> None:
        self._norm = nn.utils.clip_grad_norm_(self._params, MAX_NORM, foreach=True)
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def norm(self) -> float:
        norm = self._norm
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.item()


class DeepSpeedAdamW:
    """The optimizer of a DeepSpeed engine, which clips, updates and frees the gradients in one call."""

    def __init__(self, engine: nn.Module) -> None:
        self._engine = cast(Any, engine)

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        pass

    def norm(self) -> float:
        return float(self._engine.get_global_grad_norm())


def start_process_group() -> None:
    """Create the process group of one rank that FSDP2 and DeepSpeed need, if there is none."""
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        return
    # Norms of gradients on the host are summed by gloo.
    backends = "gloo" if backend.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)


def with_fsdp2(
    build: Builder, states_dtype: torch.dtype, *, offload: bool = False, compile_layers: bool = False
) -> Builder:
    """Return ``build`` sharded by FSDP2 over all ranks, of which there may be one.

    Parameters, gradients and moments are in ``states_dtype``; layers compute in the dtype of the other
    peers, and gradients are reduced in ``states_dtype``.

    Args:
        build: builds the model.
        states_dtype: dtype of the shards.
        offload: keep the shards, gradients and moments on the host (``CPUOffloadPolicy``), where the
            optimizer runs too.
        compile_layers: compile each layer before it is sharded.
    """

    def build_fsdp2(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        start_process_group()
        model, loss_of = build(config, memory)
        # Parameters alone: RoPE tables stay in fp32.
        for param in model.parameters():
            param.data = param.data.to(states_dtype)
        policies: dict[str, Any] = {
            "mesh": init_device_mesh(backend.device.type, (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype(), reduce_dtype=states_dtype),
        }
        if offload:
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=backend.name == "cuda")
        base: Any = model.get_submodule(str(model.base_model_prefix))
        for layer in base.layers:
            if compile_layers:
                layer.compile()
            fully_shard(layer, **policies)
        fully_shard(model, **policies)
        return model, loss_of

    return build_fsdp2


def deepspeed_settings() -> dict[str, Any]:
    """Return DeepSpeed's configuration of ZeRO-Offload as its tutorial has it, on one device.

    Stage 2 keeps the weights on the device and has gradients, fp32 masters and moments on the host:
    18 bytes per parameter there, with the copy of the weights in which updates return.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": dtype() == torch.bfloat16},
        # Becomes DeepSpeedCPUAdam under optimizer offload.
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": backend.name == "cuda"},
        },
    }


def with_deepspeed_offload(build: Builder) -> Builder:
    """Return ``build`` in an engine of DeepSpeed with its optimizer on the host.

    The first call compiles DeepSpeed's Adam for this processor.
    """

    def build_deepspeed(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        # Set for DeepSpeed, which takes it from a launcher; this process is the only rank.
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed  # pyright: ignore[reportMissingImports]

        start_process_group()
        model, _ = build(config, memory)
        engine: Any = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=deepspeed_settings()
        )[0]
        return engine, lambda ids: engine(ids, labels=ids, use_cache=False).loss

    return build_deepspeed


@dataclasses.dataclass(frozen=True)
class Peer:
    """Peer of the benchmark.

    Args:
        build: returns its model and loss.
        states: what the optimizer has, for the row.
        packages: distributions that it needs.
        optimizer: returns the optimizer of its model.
    """

    build: Builder
    states: str
    packages: tuple[str, ...] = ("liger-kernel",)
    optimizer: Callable[[nn.Module], Stepper] = ClippedAdamW

    def flash4(self) -> Peer:
        """Return this peer with transformers' FlashAttention-4."""
        return dataclasses.replace(self, build=with_flash4(self.build), packages=(*self.packages, "flash-attn-4"))

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if not installed(name)]


def _with_flash4(peers: dict[str, Peer]) -> dict[str, Peer]:
    """Return ``peers``, and each with FlashAttention-4 under ``NAME, flash4``."""
    return peers | {f"{name}, flash4": peer.flash4() for name, peer in peers.items()}


PEERS: dict[str, Peer] = {"hf": Peer(build_hf, "bf16 moments", packages=())}
PEERS |= _with_flash4(
    {
        "liger": Peer(build_liger, "bf16 moments"),
        "fsdp2": Peer(with_fsdp2(build_liger, torch.float32, offload=True), "fp32 weights and moments"),
        "fsdp2 bf16": Peer(with_fsdp2(build_liger, torch.bfloat16, offload=True), "bf16 weights and moments"),
        "deepspeed": Peer(
            with_deepspeed_offload(build_liger),
            "fp32 masters and moments",
            packages=("liger-kernel", "deepspeed"),
            optimizer=DeepSpeedAdamW,
        ),
    }
)
