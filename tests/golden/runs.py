"""The golden training run and its recorded losses."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GraniteConfig, LlamaConfig, Phi3Config

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.granite import GraniteForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.models.phi3 import Phi3ForCausalLM
from nxd_memopt.parallel_layers import grads, parallel_state

STEPS = 20
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 128,
}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
PHI3 = {"sliding_window": 9, "partial_rotary_factor": 0.5, "pad_token_id": None, "eos_token_id": 2}
MODELS = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt_neox": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**SIZES)),
    "granite": (GraniteForCausalLM, lambda: GraniteConfig(**SIZES, **FACTORS, tie_word_embeddings=True)),
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(**SIZES, **PHI3, num_key_value_heads=2)),
}
FAMILIES = ("llama", "gpt_neox")
"""The architectures that run under all settings; the others share LLaMA's code."""


def golden_file(name: str) -> Path:
    return Path(__file__).parent / f"{name}.txt"


def recorded_losses(name: str) -> list[float]:
    lines = golden_file(name).read_text(encoding="utf-8").splitlines()
    return [float(line) for line in lines if line and not line.startswith("#")]


def train(name: str, *, sequence_parallel: bool = False, memory: MemoryConfig | None = None) -> list[float]:
    """Losses of ``STEPS`` AdamW steps, fp32, on counting sequences, which a model learns; T is the process groups'.

    The initial weights are T-invariant: each rank keeps its slice of one full draw.
    """
    model_class, config = MODELS[name]
    size = parallel_state.get_tensor_model_parallel_size()
    torch.manual_seed(0)
    parallel = ParallelConfig(size, sequence_parallel_enabled=sequence_parallel)
    model = model_class(config(), parallel=parallel, memory=memory, device=backend.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    tokens = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        start, stride = torch.randint(1, 4, (2, 4, 1), generator=tokens)
        ids = ((start + stride * torch.arange(32)) % SIZES["vocab_size"]).to(backend.device)  # [B, S]
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads.allreduce_sequence_parallel_gradients(model)
        grads.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        backend.mark_step()
        losses.append(loss.item())
    return losses
