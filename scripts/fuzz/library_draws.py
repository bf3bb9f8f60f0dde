"""Draws random configurations of the library layer: a model, its ranks, memory techniques, batch and optimizer."""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
RARE_ACTIVATIONS = ("swish", "quick_gelu", "gelu_python")
EPSILONS = (1e-6, 1e-5, 1e-2, 0.1)
STRAY = {
    "sliding_window": 3,
    "use_sliding_window": False,
    "max_window_layers": 1,
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "norm_topk_prob": False,
    "use_parallel_residual": False,
    "rotary_pct": 0.5,
    "layer_norm_eps": 0.1,
    "rms_norm_eps": 0.1,
    "decoder_sparse_step": 2,
    "num_experts_per_tok": 1,
    "router_jitter_noise": 0.1,
    "shared_expert_intermediate_size": 12,
    "embedding_multiplier": 3.0,
    "logit_scale": 2.0,
    "qk_norm": True,
}
"""Keys that a config.json may have although its architecture has no such option."""

ROPES: tuple[Spec, ...] = (
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)
RARE_ROPES: tuple[Spec, ...] = (
    {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEOX_PROJECTIONS = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")


class Draw(random.Random):
    """A random generator with the choices that draws make."""

    def maybe(self, probability: float) -> bool:
        """Return True with ``probability``."""
        return self.random() < probability

    def rarely(self, common: Any, rare: Any, probability: float = 0.05) -> Any:
        """Choose from ``common``, and with ``probability`` from ``rare``."""
        return self.choice(rare if self.maybe(probability) else common)

    def some(self, values: Any) -> list[Any]:
        """Return one or more of ``values``, in random order."""
        return self.sample(list(values), self.randint(1, len(values)))


def draw_library(draw: Draw) -> Spec:
    """Return the spec of one configuration, most of which the library supports."""
    has_experts = draw.maybe(0.35)
    ranks = draw.choices((1, 2, 4), (3, 4, 3))[0]
    tensor = draw.choice([size for size in (1, 2, 4) if size <= ranks])
    replicas = ranks // tensor
    config = draw_config(draw, draw.choice(EXPERTS if has_experts else DENSE), tensor)
    expert = draw.choice([size for size in (1, 2, 4) if size <= replicas]) if has_experts else 1
    dtype = draw.choices(("float64", "float32", "bfloat16"), (6, 2, 0 if has_experts else 2))[0]
    spec: Spec = {
        "layer": "library",
        "seed": draw.randrange(10**6),
        "ranks": ranks,
        "tensor": tensor,
        "sequence": tensor > 1 and draw.maybe(0.6),
        "expert": expert,
        "dtype": dtype,
        "config": config,
        "lora": {},
        "moe": {},
    }
    if not has_experts and draw.maybe(0.2):
        spec["lora"] = draw_lora(draw, config["model_type"])
    spec["memory"] = draw_memory(draw, config)
    if has_experts:
        spec["moe"] = draw_moe(draw, spec)
    spec["batch"] = draw_batch(draw, tensor)
    spec["optimizer"] = draw_optimizer(draw, spec, replicas)
    if spec["optimizer"]["kind"] == "in_backward":
        spec["batch"]["micro_batches"] = 1
    spec["steps"] = draw.choice((2, 3))
    spec["files"] = draw.maybe(0.25) and dtype != "float64"
    spec["loss_bytes"] = draw.choice((1, 1 << 28))
    return spec


def draw_config(draw: Draw, model_type: str, tensor: int) -> Spec:
    """Return a Hugging Face config, most of which ``tensor`` ranks can share."""
    fits = not draw.maybe(0.05)
    groups = draw.choice([g for g in (1, 2, 3, 4, 6) if not fits or g % tensor == 0 or tensor % g == 0])
    heads = groups * draw.choice([m for m in (1, 2, 3, 4) if not fits or groups * m % tensor == 0])
    multiple = tensor if fits else 1
    config: Spec = {
        "model_type": model_type,
        "vocab_size": draw.choice((61, 64, 97, 128)),
        # transformers demands a multiple of the heads, although heads may have another size.
        "hidden_size": heads * -(-draw.choice((32, 36, 40, 50, 64, 96)) // heads),
        "intermediate_size": draw.randint(20, 80) // multiple * multiple,
        "num_hidden_layers": draw.choice((1, 2, 2, 3, 4)),
        "num_attention_heads": heads,
        "max_position_embeddings": 64,
        "initializer_range": draw.choice((0.05, 0.15)),
        "tie_word_embeddings": draw.maybe(0.3),
        "hidden_act": draw.rarely(ACTIVATIONS, RARE_ACTIVATIONS),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    rope = draw.rarely(ROPES, RARE_ROPES)
    if model_type == "gpt_neox":
        head_size = draw.choice((4, 5, 6, 8, 12))
        # transformers rotates an even number of dimensions alone.
        shares = [share for share in (0.25, 0.5, 0.75, 1.0) if head_size * share % 2 == 0]
        if not shares:
            head_size, shares = 8, [0.25]
        config |= {
            "hidden_size": heads * head_size,
            "rope_parameters": {**rope, "partial_rotary_factor": draw.choice(shares)},
            "layer_norm_eps": draw.choice(EPSILONS),
            "use_parallel_residual": draw.maybe(0.6),
            "attention_bias": draw.maybe(0.7),
        }
        # Both names of the option, as files of different versions have them.
        config["rotary_pct"] = config["rope_parameters"]["partial_rotary_factor"]
    else:
        config |= {
            "num_key_value_heads": groups,
            "head_dim": draw.choice((4, 6, 8, 10, 12, 16)),
            "rms_norm_eps": draw.choice(EPSILONS),
            "rope_parameters": rope,
        }
    config |= draw_own_options(draw, config)
    if draw.maybe(0.25):
        own = set(config) | own_keys(model_type)
        names = [name for name in STRAY if name not in own]
        config |= {name: STRAY[name] for name in draw.sample(names, draw.randint(1, 3))}
    return config


def own_keys(model_type: str) -> set[str]:
    """Return the options that transformers' class of ``model_type`` has: those are not stray."""
    from transformers import CONFIG_MAPPING

    return set(CONFIG_MAPPING[model_type]().to_dict())


def draw_own_options(draw: Draw, config: Spec) -> Spec:
    """Return options that one architecture has and others do not."""
    model_type = config["model_type"]
    options: Spec = {}
    if model_type in ("llama", "qwen3", "qwen3_moe") and draw.maybe(0.4):
        options["attention_bias"] = True
    if model_type == "llama":
        options["mlp_bias"] = draw.maybe(0.3)
    if model_type == "mistral":
        options["sliding_window"] = draw.choice((None, 3, 5, 100))
    if model_type in ("qwen2", "qwen3") and draw.maybe(0.5):
        options |= {"use_sliding_window": True, "sliding_window": draw.choice((3, 5))}
        options["max_window_layers"] = draw.randint(0, config["num_hidden_layers"])
    if model_type in EXPERTS and draw.maybe(0.1):
        options |= {"sliding_window": draw.choice((4, 100)), "use_sliding_window": True}
    if model_type == "mixtral":
        options |= {"num_local_experts": draw.choice((2, 4, 8)), "num_experts_per_tok": draw.rarely((2,), (1,))}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        options |= {
            "num_experts": draw.choice((4, 8)),
            "num_experts_per_tok": draw.randint(1, 3),
            "moe_intermediate_size": draw.choice((12, 16, 24)),
            "norm_topk_prob": draw.maybe(0.5),
            "decoder_sparse_step": draw.choice((1, 1, 2)),
            "mlp_only_layers": draw.choice(([], [0])),
        }
        # A softmax over the one expert of a token has no gradient: the library refuses it.
        if options["num_experts_per_tok"] == 1:
            options["norm_topk_prob"] = draw.maybe(0.05)
        if options["mlp_only_layers"] or options["decoder_sparse_step"] == 2:
            config["num_hidden_layers"] = max(2, config["num_hidden_layers"])
    if model_type == "qwen2_moe":
        options |= {"shared_expert_intermediate_size": draw.choice((12, 20)), "qkv_bias": draw.maybe(0.7)}
    return options


def draw_moe(draw: Draw, spec: Spec) -> Spec:
    """Return options of the routers and experts, in which the model's config is silent."""
    config, dtype, memory = spec["config"], spec["dtype"], spec["memory"]
    experts = config.get("num_local_experts", config.get("num_experts"))
    options: Spec = {
        "moe_router_load_balancing_type": draw.choice(
            ("hf_aux_loss", "aux_loss", "seq_aux_loss", "global_aux_loss", "none")
        ),
        "moe_aux_loss_coeff": draw.choice((0.0, 0.3)),
        "moe_z_loss_coeff": draw.choice((None, 0.1)),
        "moe_token_dispatcher_type": draw.choice(("allgather", "alltoall")),
    }
    if options["moe_router_load_balancing_type"] == "none":
        options["moe_aux_loss_coeff"] = 0.0
    if draw.maybe(0.2):
        options["moe_expert_block_size"] = draw.choice((2, 4, 8))
        if not draw.maybe(0.1):
            options["moe_token_dispatcher_type"] = "allgather"
    elif draw.maybe(0.3):
        # As large as the number of experts: room for all tokens, so that none is dropped.
        options["moe_expert_capacity_factor"] = float(experts)
        options["moe_pad_expert_input_to_capacity"] = draw.maybe(0.5)
    if memory.get("recompute_granularity") != "full" and "recompute_method" not in memory:
        options["moe_layer_recompute"] = draw.maybe(0.3)
    if draw.maybe(0.2):
        options["moe_router_dtype"] = "fp64" if dtype == "float64" else "fp32"
    return options


def draw_memory(draw: Draw, config: Spec) -> Spec:
    """Return memory techniques; nine of ten draws keep to the rules for what goes together."""
    layers = config["num_hidden_layers"]
    has_experts = config["model_type"] in EXPERTS
    usual = not draw.maybe(0.1)
    options: Spec = {"fused_linear_cross_entropy": draw.maybe(0.7)}
    options["attention_backend"] = draw.choice(("auto", "math", "tiled", "sdpa"))
    granularity = draw.choice((None, "selective", "full", "full"))
    offloaded = draw.randint(1, layers) if draw.maybe(0.3) else 0
    if offloaded and not has_experts and draw.maybe(0.4):
        options["cpu_offloading_weights"] = True
    elif offloaded and granularity == "full" and draw.maybe(0.5):
        options["cpu_offloading_activations"] = True
    elif usual and granularity == "full":
        offloaded = min(offloaded, layers - 1)
    options["cpu_offloading_num_layers"] = offloaded
    if granularity is not None:
        options["recompute_granularity"] = granularity
    if granularity == "selective":
        options |= draw_selective(draw, layers, has_experts=has_experts, usual=usual)
    if granularity == "full":
        # Without the two switches, the layers that offload are not recomputed.
        keeps = options.get("cpu_offloading_weights") or options.get("cpu_offloading_activations")
        options |= draw_full(draw, layers if keeps else layers - offloaded, usual=usual)
    modules = set(options.get("recompute_modules", ()))
    if not (usual and (has_experts or {"mlp", "mlp_act"} & modules)) and draw.maybe(0.25):
        options["mlp_tile_tokens"] = draw.choice((1, 4, 7, 16))
    keeps_results = options.get("recompute_keep_core_attn") or {"attn", "core_attn"} & modules
    if not (usual and (has_experts or keeps_results)) and draw.maybe(0.25):
        options["attention_head_groups"] = draw.choice((1, 2, 2, 3))
    return options


def draw_selective(draw: Draw, layers: int, *, has_experts: bool, usual: bool) -> Spec:
    """Return modules to recompute."""
    names = ["core_attn", "attn", "norm", "mlp_act", "mlp"]
    if has_experts:
        names = ["core_attn", "attn", "norm", "moe"] if usual else [*names, "moe"]
    options: Spec = {"recompute_modules": draw.some(names)}
    if draw.maybe(0.3):
        options |= {"recompute_method": "block", "recompute_num_layers": draw.randint(1, layers)}
    return options


def draw_full(draw: Draw, layers: int, *, usual: bool) -> Spec:
    """Return which of ``layers`` layers are recomputed, and how."""
    options: Spec = {}
    method = draw.choice((None, "uniform", "block", "nested")) if layers else None
    if method is not None:
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        fits = usual and method != "block"
        number = draw.choice(divisors) if fits else draw.randint(1, layers)
        options |= {"recompute_method": method, "recompute_num_layers": number}
    if method != "nested" and draw.maybe(0.2):
        options["recompute_keep_core_attn"] = True
        if usual:
            options["attention_backend"] = "sdpa"
    return options


def draw_batch(draw: Draw, tensor: int) -> Spec:
    """Return the shape of the micro-batches, what masks them, and which labels are trained."""
    length = draw.randint(2, 24)
    if not draw.maybe(0.05):
        length = max(1, length // tensor) * tensor if tensor > 1 else length
    return {
        "rows": draw.randint(1, 3),
        "length": max(2, length),
        "kind": draw.choice(("plain", "plain", "padded", "positions", "documents")),
        "labels": draw.choice(("all", "some", "first rows")),
        "micro_batches": draw.choice((1, 1, 2, 3)),
    }


def draw_lora(draw: Draw, model_type: str) -> Spec:
    """Return the options of adapters."""
    targets = NEOX_PROJECTIONS if model_type == "gpt_neox" else PROJECTIONS
    return {
        "lora_rank": draw.choice((1, 3, 8)),
        "lora_alpha": draw.choice((2, 5)),
        "target_modules": draw.some(targets),
        "use_rslora": draw.maybe(0.3),
    }


def draw_optimizer(draw: Draw, spec: Spec, replicas: int) -> Spec:
    """Return the class of the optimizer and its options."""
    kinds = ["zero1", "none", "nxd"]
    if spec["dtype"] != "bfloat16":
        kinds += ["torch", "adamw", "in_backward"]
    if replicas > 1:
        kinds += ["zero2", "zero3"]
    if spec["dtype"] != "float64":
        kinds.append("offload")
    kind = draw.choice(kinds)
    options: Spec = {
        "kind": kind,
        "lr": draw.choice((1e-2, 3e-3)),
        "betas": draw.choice(([0.9, 0.95], [0.8, 0.9], [0.0, 0.9])),
        # Not smaller: a gradient that is 0 but for rounding would move its weight by a large part of lr.
        "eps": draw.choice((1e-2, 1e-3)),
        "clip": draw.choice((None, 0.5, 5.0)),
        "groups": draw.choice(
            (
                [["*norm*", 0.0, 1.0], ["*bias*", 0.0, 1.0], ["*", 0.1, 1.0]],
                [["*layers*", 0.1, 1.0], ["*", 0.0, 1.0]],
                [["*", 0.1, 1.0]],
                [["*layers.0.*", 0.1, 0.5], ["*q_proj*", 0.0, 1.0], ["*", 0.1, 2.0]],
                [["*lm_head*", 0.0, 0.1], ["*embed*", 0.0, 1.0], ["*", 0.2, 1.0]],
            )
        ),
    }
    if kind in ("torch", "adamw") and options["clip"] is not None and draw.maybe(0.3):
        options["norm"] = "inf"
    if kind == "in_backward":
        options["clip"] = None
    if kind == "zero3" and draw.maybe(0.3):
        options["reshard_after_forward"] = False
    if kind == "nxd":
        options["zero_one_enabled"] = draw.maybe(0.5)
    if kind == "offload":
        options["fraction"] = draw.choice((0.0, 0.4, 1.0))
        options["remainders"] = spec["dtype"] == "bfloat16" and draw.maybe(0.3)
        options["sharded"] = draw.maybe(0.5)
        options["in_forward"] = draw.maybe(0.5) and not (options["sharded"] and replicas > 1)
    return options
