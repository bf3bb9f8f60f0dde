"""Tiny models for the tests: transformers' as the reference, sliced by a hand-written table."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.models import model_class
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.resharding import gather_full_tensor
from nxd_memopt.parallel_layers.utils import copy_tensor_model_parallel_attributes
from tests.reference import pad, shard

BATCH, LENGTH, VOCAB = 3, 12, 61  # 61 is prime: padded at every T; 12 is a multiple of every T tested
IGNORED = -100

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query_key_value", "dense_h_to_4h")
_TABLES = ("embed_tokens", "embed_in", "lm_head")
_COLUMNS = ("o_proj", "down_proj", "dense", "dense_4h_to_h")


FAMILY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # attention and gradients far from uniform
}


BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def llama_config(**changes: Any) -> LlamaConfig:
    """8 query heads on 2 KV heads: T = 4 shares each KV head between two ranks."""
    return LlamaConfig(**FAMILY | {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, **changes})


def mistral_config(**changes: Any) -> MistralConfig:
    """Attention windows of 5 of 12 tokens, and heads of another size than hidden / heads."""
    return MistralConfig(**FAMILY | {"sliding_window": 5, "head_dim": 6, **changes})


def qwen2_config(**changes: Any) -> Qwen2Config:
    """Biases on query, key and value."""
    return Qwen2Config(**FAMILY | changes)


def qwen3_config(**changes: Any) -> Qwen3Config:
    """Norms of query and key; heads of another size than hidden / heads."""
    return Qwen3Config(**FAMILY | {"head_dim": 6, **changes})


def granite_config(**changes: Any) -> GraniteConfig:
    """Four factors, none of which is a power of two."""
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.7, "residual_multiplier": 0.22}
    return GraniteConfig(**FAMILY | factors | {"logits_scaling": 3.0, **changes})


def phi3_config(**changes: Any) -> Phi3Config:
    """Windows of 5 of 12 tokens, and RoPE of half of each head; files have fused projections."""
    own = {"sliding_window": 5, "partial_rotary_factor": 0.5, "pad_token_id": None, "eos_token_id": 2}
    return Phi3Config(**FAMILY | own | changes)


def gpt_neox_config(**changes: Any) -> GPTNeoXConfig:
    sizes = {name: value for name, value in FAMILY.items() if name != "num_key_value_heads"}
    return GPTNeoXConfig(**sizes | {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, **changes})


def mixtral_config(**changes: Any) -> MixtralConfig:
    """4 experts, and transformers' balancing loss with a coefficient that no tolerance hides."""
    own: dict[str, Any] = {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    }
    return MixtralConfig(**FAMILY | BALANCED | own | changes)


def qwen2_moe_config(**changes: Any) -> Qwen2MoeConfig:
    """Biases on query, key and value, and a shared expert of another width; a dense MLP in layer 1."""
    own = {"shared_expert_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2}
    shared = qwen3_moe_config().to_dict()
    names = [field.name for field in dataclasses.fields(Qwen2MoeConfig) if field.name in shared]
    return Qwen2MoeConfig(**{name: shared[name] for name in names} | own | changes)


def qwen3_moe_config(**changes: Any) -> Qwen3MoeConfig:
    """8 experts in layers 0 and 2, a dense MLP in layer 1; weights of the chosen experts do not sum to 1."""
    own: dict[str, Any] = {"moe_intermediate_size": 12, "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 8}
    own |= {"num_experts": 8, "num_experts_per_tok": 3}
    return Qwen3MoeConfig(**FAMILY | BALANCED | own | changes)


DENSE = ("llama", "gpt_neox")  # of the golden runs
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # heads of 12 have 6 wavelengths: one is kept, one blended, four slowed
}
CONFIGS = {
    "llama": llama_config,
    "llama tied": lambda: llama_config(tie_word_embeddings=True),
    "llama 3 rope": lambda: llama_config(rope_parameters=LLAMA3_ROPE, head_dim=12),
    "llama linear rope": lambda: llama_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama biases, gelu": lambda: llama_config(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama one KV head": lambda: llama_config(num_key_value_heads=1),
    "llama all KV heads": lambda: llama_config(num_key_value_heads=8),
    "llama padding token": lambda: llama_config(pad_token_id=0, rms_norm_eps=0.1),
    "mistral": mistral_config,
    "qwen2 tied, window in the second layer": lambda: qwen2_config(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3 dense, biases": lambda: qwen3_config(attention_bias=True),
    "granite": lambda: granite_config(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "phi3": phi3_config,
    "neox": gpt_neox_config,
    "neox sequential residual": lambda: gpt_neox_config(use_parallel_residual=False, layer_norm_eps=0.1),
    "neox tied, full rotary": lambda: gpt_neox_config(tie_word_embeddings=True, rotary_pct=1.0),
    "neox half rotary, no attention bias": lambda: gpt_neox_config(rotary_pct=0.5, attention_bias=False),
    "mixtral": mixtral_config,
    "mixtral without balancing": lambda: mixtral_config(output_router_logits=False, tie_word_embeddings=True),
    "mixtral, window": lambda: mixtral_config(sliding_window=5),
    "qwen2 with experts": qwen2_moe_config,
    "qwen2 with experts, windows": lambda: qwen2_moe_config(
        use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": qwen3_moe_config,
    "qwen3 normalised, biases": lambda: qwen3_moe_config(norm_topk_prob=True, attention_bias=True),
    "neox tanh gelu": lambda: gpt_neox_config(hidden_act="gelu_new"),
}


def hugging_face(config: Any) -> nn.Module:
    """transformers' model, eager attention, weights that depend on the seed alone; biases and norms not trivial."""
    torch.manual_seed(5)
    kernels = {"attn_implementation": "eager"}
    if hasattr(config, "num_experts_per_tok"):
        kernels["experts_implementation"] = "eager"  # the others have no float64
    model = AutoModelForCausalLM.from_config(config, **kernels).to(torch.get_default_dtype())
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.3 * torch.randn(param.shape))
    return model


def batch(**shape: int) -> dict[str, Tensor]:
    """Ids of the whole vocabulary, 0 included; labels of which some are ignored."""
    rows, length = shape.get("rows", BATCH), shape.get("length", LENGTH)
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    ids[0, :2] = torch.tensor([0, VOCAB - 1])
    labels = ids.clone()
    labels[0, 3:5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def padded_batch() -> dict[str, Tensor]:
    """Row 0 padded on the right, row 1 on the left with positions to match, row 2 two packed documents' positions.

    What a padded position predicts is ignored: frameworks differ there.
    """
    inputs = batch()
    mask, positions = torch.ones(BATCH, LENGTH, dtype=torch.long), torch.arange(LENGTH).repeat(BATCH, 1)
    mask[0, 9:], mask[1, :4] = 0, 0
    inputs["labels"][0, 9:], inputs["labels"][1, :5] = IGNORED, IGNORED
    positions[1] = (positions[1] - 4).clamp(min=0)
    positions[2, 5:] -= 5
    return {**inputs, "attention_mask": mask, "position_ids": positions}


def full_parameters(model: Any) -> dict[str, Tensor]:
    return separate({name: param.detach().clone() for name, param in model.named_parameters()}, model.config)


def full_gradients(model: Any) -> dict[str, Tensor]:
    return separate({name: param.grad for name, param in model.named_parameters()}, model.config)


def separate(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Phi-3's fused weights, gradients or factors B as the separate ones that our models have; A is in all parts."""
    found = {}
    for name, tensor in tensors.items():
        if (".qkv_proj." not in name and ".gate_up_proj." not in name) or config.model_type != "phi3":
            found[name] = tensor
            continue
        own = "qkv_proj" if "qkv_proj" in name else "gate_up_proj"
        parts = ("q_proj", "k_proj", "v_proj") if own == "qkv_proj" else ("gate_proj", "up_proj")
        if "lora_A" in name:
            found[name.replace(own, parts[0])] = tensor
            continue
        unit = len(tensor) // (config.num_attention_heads + 2 * config.num_key_value_heads)
        rows = [unit * config.num_attention_heads, *[unit * config.num_key_value_heads] * 2]
        if own == "gate_up_proj":
            rows = [len(tensor) // 2] * 2
        found |= {name.replace(own, part): piece for part, piece in zip(parts, tensor.split(rows), strict=True)}
    return found


def local_part(name: str, full: Tensor, config: Any) -> Tensor:
    """This rank's part of a full Hugging Face parameter, by a table of its own."""
    module, kind = name.split(".")[-2:]
    if module == "experts":
        return _local_experts(kind, full)
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    if module in _TABLES:
        return shard(pad(full, 0, size), 0, size=size, rank=rank)
    if module in _COLUMNS:
        return full if kind == "bias" else _local_heads(module, full, 1, config)
    if module not in _ROWS:
        return full
    return _local_heads(module, full, 0, config)


def _local_experts(name: str, full: Tensor) -> Tensor:
    """This rank's experts, and of each its rows of gate and up or its columns of down."""
    state = parallel_state
    full = shard(full, 0, size=state.get_expert_model_parallel_size(), rank=state.get_expert_model_parallel_rank())
    size, rank = state.get_tensor_model_parallel_size(), state.get_tensor_model_parallel_rank()
    if name == "down_proj":
        return shard(full, 2, size=size, rank=rank)
    return shard(full, 1, size=size, rank=rank, stride=2)


def _local_heads(module: str, full: Tensor, dim: int, config: Any) -> Tensor:
    """This rank's heads along ``dim``, by neuronx-distributed's rules: on trn1 all KV heads are repeated as one."""
    size, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    kv_heads = getattr(config, "num_key_value_heads", size)
    replicas = max(1, size // kv_heads)
    on_trn1 = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") == "trn1"
    if module in ("k_proj", "v_proj") and replicas > 1:
        heads = full.unflatten(0, (kv_heads, -1))
        repeated = torch.cat([heads] * replicas) if on_trn1 else heads.repeat_interleave(replicas, dim=0)
        full = repeated.flatten(0, 1)
    elif module in ("q_proj", "o_proj") and replicas > 1 and on_trn1:
        # [KV head, its part of m, rows] to [part, KV head, rows]
        full = full.unflatten(dim, (kv_heads, replicas, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return full.chunk(size, dim)[rank]


def parallel_model(
    config: Any, full: dict[str, Tensor] | None = None, *, sequence_parallel: bool = False, **options: Any
) -> nn.Module:
    """The library's model on the present process groups, with this rank's part of the full weights."""
    cls = model_class(config.model_type)
    size = parallel_state.get_tensor_model_parallel_size()
    moe = options.pop("moe", None)
    expert_size = parallel_state.get_expert_model_parallel_size() if hasattr(config, "num_experts") else 1
    parallel = ParallelConfig(
        size, sequence_parallel_enabled=sequence_parallel and size > 1, expert_model_parallel_size=expert_size
    )
    given = {} if moe is None else {"moe": moe}
    model = cls(config, parallel=parallel, memory=MemoryConfig(**options), **given)
    if full is not None:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(local_part(name, full[name], config))
    return model


def loss_and_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the loss of ``batch()`` and this rank's reduced gradients, by name."""
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    gradients = {name: cast(Tensor, param.grad).clone() for name, param in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def gathered(tensor: Tensor, param: Tensor) -> Tensor:
    """The full tensor, on every rank, of which each rank's ``tensor`` is the shard that ``param`` is."""
    tensor = tensor.detach().clone()
    copy_tensor_model_parallel_attributes(tensor, param)
    shared = [gather_full_tensor(tensor)]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return shared[0]
