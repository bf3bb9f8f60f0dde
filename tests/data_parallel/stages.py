"""Tiny models at every ZeRO stage on real ranks, for the tests of data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.data_parallel import Zero2Optimizer, Zero3Optimizer, shard_model, without_reduction
from nxd_memopt.memory import apply_memory
from nxd_memopt.models import model_class
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OffloadedZero1Optimizer
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.data_shards import gather_rows, local_rows
from tests.checkpoint_models import llama_config, neox_config
from tests.deferred_transfers import DeferredTransfers

STAGES = ("none", "zero1", "zero2", "zero3")
OFFLOAD = "offload"  # zero1 with half of the states on the host
REMAINDERS = "remainders"  # the same, with the masters' remainders
MAX_NORM = 0.5  # below the norm of the first gradients: clipping is active


def initialize(tensor_size: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)


def build(name: str, *, memory: MemoryConfig | None = None, dtype=torch.float32, seed=3, sequence=True, **changes):
    """A model with equal full weights at every T, without dropout."""
    torch.manual_seed(seed)
    config = llama_config(**changes) if name == "llama" else neox_config(**changes)
    size = parallel_state.get_tensor_model_parallel_size()
    parallel = ParallelConfig(tensor_model_parallel_size=size, sequence_parallel_enabled=sequence and size > 1)
    model = model_class(config.model_type)(config, parallel=parallel, memory=memory, dtype=dtype)
    if memory is not None:
        apply_memory(model, memory)
    return model


def parameter_groups(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = list(params)
    matrices = [param for param in params if param.dim() > 1]
    vectors = [param for param in params if param.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


@dataclass
class Run:
    """A model and its optimizer at one stage, and what each step gave."""

    model: torch.nn.Module
    stage: str
    optimizer: NeuronZero1Optimizer
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, model, stage: str, *, max_norm=MAX_NORM, reduce_dtype=torch.float32, fraction=0.5, **options) -> Run:
        if stage == "zero3":
            shard_model(model, reduce_dtype=reduce_dtype, **options)
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = parameter_groups(trained)
        shared: dict[str, Any] = {"max_norm": max_norm, "lr": 1e-2, "eps": 1e-3, "betas": (0.8, 0.9)}
        if stage == "zero3":
            return cls(model, stage, Zero3Optimizer(groups, AdamW, **shared))
        if stage == "zero2":
            # 2 KiB: several buckets
            shared |= {"bucket_cap_mb_reduce_scatter": 2 / 1024, "reduce_dtype": reduce_dtype}
            return cls(model, stage, Zero2Optimizer(groups, AdamW, **shared, **options))
        if stage in (OFFLOAD, REMAINDERS):
            # half of each rank's shards on the host, in chunks of 64 elements
            places = {"optimizer_offload_fraction": fraction, "transfers": DeferredTransfers(), "chunk_elements": 64}
            shared |= places | {"staging_bytes": 3 * 12 * 64, "resident_elements": 16}
            shared["store_param_remainders"] = stage == REMAINDERS
            return cls(model, stage, OffloadedZero1Optimizer(groups, use_grad_acc_hook=True, **shared))
        sharding_groups = None
        if stage == "none":
            sharding_groups = [[rank] for rank in range(parallel_state.get_world_size())]
        optimizer = NeuronZero1Optimizer(
            groups, AdamW, sharding_groups=sharding_groups, use_grad_acc_hook=True, **shared
        )
        return cls(model, stage, optimizer)

    def backward(self, batches: Iterable[Tensor]) -> None:
        batches = list(batches)
        for batch in batches:
            loss = self.model(batch, labels=batch).loss / len(batches)
            self.losses.append(loss.item())
            loss.backward()

    def reduce(self) -> None:
        if self.stage == "none":
            grads.bucket_allreduce_gradients(param for param in self.model.parameters())  # also a generator
        self.norms.append(self.optimizer.reduce_gradients().item())

    def step(self, index: int, *, micro_batches: int = 1, full: bool = False) -> None:
        """One optimizer step; ``full`` accumulates full gradients over the micro-batches."""
        batches = [batch_of(index, i) for i in range(micro_batches)]
        with without_reduction(self.model) if full else nullcontext():
            if full:
                for batch in batches[:-1]:
                    (self.model(batch, labels=batch).loss / micro_batches).backward()
        if full:
            (self.model(batches[-1], labels=batches[-1]).loss / micro_batches).backward()
        else:
            self.backward(batches)
        self.reduce()
        self.optimizer.update_parameters()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """This tensor-parallel rank's full reduced gradients, after ``reduce``."""
        shards = {id(each.param): each.shard for each in self.optimizer._sharded}
        found = {}
        for name, param in self.model.named_parameters():
            shard = shards[id(param)]
            grad = shard.grad
            assert grad is not None, name
            if self.stage != "none":
                rows = [torch.empty(0)] * parallel_state.get_data_parallel_size()
                torch.distributed.all_gather_object(rows, grad.clone(), parallel_state.get_data_parallel_group())
                grad = torch.cat(rows)
            found[name] = grad.flatten()[: param.numel()].view(param.shape)
        return found

    def weights(self) -> dict[str, Tensor]:
        """This tensor-parallel rank's full weights, in the model's dtype."""
        return {
            name: gather_rows(tensor).detach().clone() for name, tensor in self.model.state_dict(keep_vars=True).items()
        }

    def stored_bytes(self) -> int:
        """Bytes of parameters and gradients that exist now on this rank."""
        total = 0
        for param in self.model.parameters():
            rows = local_rows(param)
            total += rows.nbytes
            if param.grad is not None:
                total += local_rows(param.grad).nbytes
        return total


def batch_of(step: int, micro_batch: int = 0) -> Tensor:
    """Another batch of token ids ``[2, 8]`` for each step, micro-batch and data-parallel rank."""
    seed = 100 * step + 10 * micro_batch + parallel_state.get_data_parallel_rank()
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed))
