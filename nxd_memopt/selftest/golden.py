"""The golden training run: tiny models, and their losses as recorded in fp32 on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GraniteConfig, LlamaConfig, MixtralConfig, Phi3Config

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.granite import GraniteForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.models.mixtral import MixtralForCausalLM
from nxd_memopt.models.phi3 import Phi3ForCausalLM
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers import grads, parallel_state

STEPS = 20
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 128,
}
LARGEST_T = SIZES["num_attention_heads"]
"""Every rank has a head."""
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
PHI3: dict[str, Any] = {"sliding_window": 9, "partial_rotary_factor": 0.5, "pad_token_id": None, "eos_token_id": 2}
MODELS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt_neox": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**SIZES)),
    "mixtral": (MixtralForCausalLM, lambda: MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)),
    "granite": (GraniteForCausalLM, lambda: GraniteConfig(**SIZES, **FACTORS, tie_word_embeddings=True)),
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(**SIZES, **PHI3, num_key_value_heads=2)),
}
FAMILIES = ("llama", "gpt_neox", "mixtral")
"""The models with code of their own; the others share LLaMA's."""
GOLDEN_FILE = Path(__file__).with_name("golden.json")


def recorded_losses(name: str) -> list[float]:
    """Return the recorded loss of each step; ``make golden`` records them."""
    return json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["losses"][name]


def build(name: str, *, sequence_parallel: bool = False, memory: MemoryConfig | None = None) -> Any:
    """Return a model on the device; its initial weights are equal for every T: each rank keeps its part of one draw."""
    model_class, config = MODELS[name]
    size = parallel_state.get_tensor_model_parallel_size()
    options: dict[str, Any] = {}
    # Where shapes may not depend on the routing, blocks of rows: no token is dropped, and the losses are the same.
    if name == "mixtral" and backend.shapes_are_static:
        options["moe"] = MoEConfig(4, moe_expert_block_size=64)
    torch.manual_seed(0)
    parallel = ParallelConfig(size, sequence_parallel_enabled=sequence_parallel)
    return model_class(config(), parallel=parallel, memory=memory, device=backend.device, **options)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the golden run."""
    return AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


def train(
    name: str,
    *,
    sequence_parallel: bool = False,
    memory: MemoryConfig | None = None,
    steps: int = STEPS,
    after_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the losses of AdamW steps in fp32, on counting sequences, which a model learns.

    Args:
        name: one of ``MODELS``.
        sequence_parallel: shard the residual stream along the sequence; T is the process groups'.
        memory: memory techniques.
        steps: number of steps.
        after_step: called after each step.
    """
    model = build(name, sequence_parallel=sequence_parallel, memory=memory)
    optimizer = optimizer_of(model)
    tokens = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(steps):
        start, stride = torch.randint(1, 4, (2, 4, 1), generator=tokens)
        ids = ((start + stride * torch.arange(32)) % SIZES["vocab_size"]).to(backend.device)  # [B, S]
        losses.append(step(model, optimizer, ids).item())
        after_step()
    return losses


def step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """Run one step on ``ids``, ``[B, S]``, and return its loss, 0-dim."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    grads.clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    backend.mark_step()
    return loss.detach()
