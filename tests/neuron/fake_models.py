"""Runs models on the stand-in ``neuron`` device without numbers: placement, shapes, what is materialised.

Runs in a process of its own, since a process can give the device a name only once: ``python -m tests.neuron.fake_models
llama:640 gpt_neox:1024:recompute``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxd_memopt.backends import BACKEND_REASON, backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.parallel_layers import parallel_state
from tests.reference import fake_world
from tests.reference_models import gpt_neox_config, llama_config

BATCH = 2
SHARDS = 4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 8, "max_position_embeddings": 4096}
MODELS = {
    "llama": lambda: (LlamaForCausalLM, llama_config(**SIZES, **HEADS, num_key_value_heads=4)),
    "gpt_neox": lambda: (GPTNeoXForCausalLM, gpt_neox_config(**SIZES, **HEADS)),
}


class FusedKernel(torch.autograd.Function):
    """The device's flash attention, in shapes alone: saves no S x S tensor and makes none."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


class DeviceAttention:
    """``scaled_dot_product_attention`` of the device: its flash kernel within the kernel's limits, else a failure."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query, key, value, *, attn_mask, dropout_p, is_causal, enable_gqa, scale):
        assert query.shape == key.shape == value.shape and not enable_gqa, "the kernel has no grouped heads"
        assert query.size(2) % 512 == 0 and query.size(3) <= 128
        assert is_causal and attn_mask is None and dropout_p == 0 and scale is None
        self.calls += 1
        return FusedKernel.apply(query, key, value)


class Materialised(TorchDispatchMode):
    """Dtypes of tensors made that hold a square of the sequence, and devices that tensors were made on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.squares, self.devices = length, set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.devices.add(str(leaf.device))
                if sum(size == self.length for size in leaf.shape) > 1:
                    self.squares.add(str(leaf.dtype))
        return out


def run(name: str, length: int, *, padded: bool, recompute: str | None) -> None:
    """One forward and backward; prints what happened in a line per fact."""
    cls, config = MODELS[name]()
    parallel = parallel_state.get_tensor_model_parallel_size()
    options = ParallelConfig(parallel, sequence_parallel_enabled=parallel > 1)
    model = cls(config, parallel=options, memory=MemoryConfig(recompute_granularity=recompute), device=backend.device)
    input_ids = torch.zeros(BATCH, length, dtype=torch.long, device=backend.device)
    attention_mask = torch.ones_like(input_ids) if padded else None
    attention = torch.nn.functional.scaled_dot_product_attention = DeviceAttention()
    # backward in this thread: a dispatch mode is a thread's own
    with torch.autograd.set_multithreading_enabled(False), Materialised(length) as made:
        loss = model(input_ids, labels=input_ids, attention_mask=attention_mask).loss
        loss.backward()
    wrong = [n for n, p in model.named_parameters() if p.grad is None or p.grad.shape != p.shape]
    print(
        f"loss {loss.device} {tuple(loss.shape)}; fused calls {attention.calls}; squares {sorted(made.squares)}; "
        f"devices {sorted(made.devices)}; gradients missing {wrong}"
    )


def main() -> None:
    print(BACKEND_REASON)
    for case in sys.argv[1:]:
        name, length, *flags = case.split(":")
        world = fake_world(SHARDS) if "sharded" in flags else nullcontext()
        with world, FakeTensorMode(allow_non_fake_inputs=True):
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=SHARDS if "sharded" in flags else 1)
            run(name, int(length), padded="padded" in flags, recompute="full" if "recompute" in flags else None)
            parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
