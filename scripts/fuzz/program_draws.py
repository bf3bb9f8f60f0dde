"""Draws pairs of training runs that must be equal: one on one rank, one that shares its work otherwise."""

from __future__ import annotations

from typing import Any

from scripts.fuzz.library_draws import NEOX_PROJECTIONS, PROJECTIONS, Draw, Spec

STEPS = 5
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe")
FORMATS = ("jsonl", "json array", "parquet", "saved", "text")


def draw_program(draw: Draw) -> Spec:
    """Return the spec of a pair."""
    config = draw_model(draw)
    has_experts = "moe" in config["model_type"] or config["model_type"] == "mixtral"
    ranks = draw.choice((1, 2, 2, 4))
    tensor = draw.choice([size for size in (1, 2) if size <= ranks])
    replicas = ranks // tensor
    lora = {} if has_experts or draw.maybe(0.75) else draw_lora(draw, config["model_type"])
    data = draw_data(draw)
    common: dict[str, Spec] = {
        "data": data,
        "optimizer": draw_optimizer(draw, has_adapters=bool(lora)),
        "trainer": {"seed": draw.randrange(1000), "save_interval": 0, "val_check_interval": draw.choice((0, 2))},
        "lora": lora,
        "moe": draw_moe(draw) if has_experts else {},
    }
    other: dict[str, Spec] = {
        "parallel": {"tensor_model_parallel_size": tensor, "sequence_parallel_enabled": tensor > 1 and draw.maybe(0.7)},
        "data_parallel": {},
        "data": {},
        "optimizer": {},
        "memory": draw_memory(draw, config["num_hidden_layers"], has_experts=has_experts),
        "trainer": {"log_every_n_steps": draw.choice((1, 2, 3)), "async_save": draw.maybe(0.2)},
    }
    if has_experts:
        other["parallel"]["expert_model_parallel_size"] = draw.choice([n for n in (1, 2) if replicas % n == 0])
    # A loss of each micro-batch depends on its rows.
    if common["moe"].get("moe_router_load_balancing_type") not in ("aux_loss", "hf_aux_loss"):
        fitting = [n for n in (1, 2, 4) if data["global_batch_size"] % (n * replicas) == 0]
        other["data"]["micro_batch_size"] = draw.choice(fitting)
    draw_sharding(draw, common, other, replicas)
    spec: Spec = {
        "layer": "program",
        "config": config,
        "documents": {"seed": draw.randrange(1000), "number": draw.choice((40, 120))},
        "formats": [draw.choice(FORMATS), draw.choice(FORMATS)],
        "common": common,
        "ranks": ranks,
        "other": other,
        "stop_after": draw.choice((None, None, 1, 2, 3)),
    }
    if data.get("format") == "messages" or spec["documents"]["number"] == 40:
        spec["formats"] = [each if each != "text" else "jsonl" for each in spec["formats"]]
    if "text" in spec["formats"]:
        # A text file is one document: both runs read it.
        spec["formats"] = ["text", "text"]
    if spec["stop_after"] is not None:
        spec["resumed_on"] = draw.choice((1, 2))
    return spec


def draw_model(draw: Draw) -> Spec:
    """Return the overrides of a random model."""
    model_type = draw.choice(MODELS)
    heads, groups = draw.choice(((4, 2), (4, 4), (6, 2), (8, 4)))
    config: Spec = {
        "model_type": model_type,
        "vocab_size": 257,
        "hidden_size": heads * 8,
        "intermediate_size": draw.choice((36, 44)),
        "num_hidden_layers": draw.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "max_position_embeddings": 64,
        "eos_token_id": 256,
        "tie_word_embeddings": draw.maybe(0.3),
    }
    if model_type != "gpt_neox":
        config["num_key_value_heads"] = groups
    if model_type == "mistral":
        config["sliding_window"] = draw.choice((None, 5))
    if model_type == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    if model_type.endswith("_moe"):
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
        config["norm_topk_prob"] = draw.maybe(0.5)
    if model_type == "qwen2_moe":
        config["shared_expert_intermediate_size"] = 16
    return config


def draw_data(draw: Draw) -> Spec:
    """Return packing, batch sizes and the format of rows."""
    options: Spec = {
        "seq_length": draw.choice((16, 24, 32)),
        "micro_batch_size": draw.choice((1, 2)),
        "global_batch_size": draw.choice((4, 8)),
        "eval_sequences": draw.choice((0, 3, 5)),
        "packing": draw.choice(("auto", "concatenate", "best_fit")),
        "isolate_documents": draw.maybe(0.7),
    }
    if draw.maybe(0.3):
        options |= {
            "format": "messages",
            "train_on_input": draw.maybe(0.3),
            "packing": draw.choice(("auto", "best_fit")),
        }
    return options


def draw_optimizer(draw: Draw, *, has_adapters: bool) -> Spec:
    """Return the options of AdamW that both runs have."""
    options: Spec = {
        "lr": 0.01,
        # Not smaller: it would amplify the rounding of gradients that are 0 but for it.
        "eps": 1e-3,
        "lr_schedule": draw.choice(("cosine", "linear", "constant")),
        "warmup_steps": draw.choice((0, 2)),
        "clip_grad": draw.choice((0.0, 0.5, 1.0)),
    }
    # The decay ends there also in a run that stops before.
    if options["lr_schedule"] != "constant":
        options["decay_steps"] = STEPS
    if not has_adapters:
        options["no_decay"] = draw.choice(([], ["embed"], ["layers.0"]))
        options["lr_multipliers"] = draw.choice(({}, {"layers.0": 0.5}, {"norm": 2.0}))
    return options


def draw_moe(draw: Draw) -> Spec:
    """Return the losses of the routers."""
    kind = draw.choice(("none", "aux_loss", "hf_aux_loss", "seq_aux_loss", "global_aux_loss"))
    return {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": 0.0 if kind == "none" else 0.1,
        "moe_z_loss_coeff": draw.choice((None, 0.01)) if kind != "none" else None,
    }


def draw_lora(draw: Draw, model_type: str) -> Spec:
    """Return the options of adapters."""
    targets = NEOX_PROJECTIONS if model_type == "gpt_neox" else PROJECTIONS
    return {"lora_rank": draw.choice((2, 4)), "target_modules": draw.some(targets)}


def draw_memory(draw: Draw, layers: int, *, has_experts: bool) -> Spec:
    """Return techniques that the second run applies."""
    options: Spec = dict(
        draw.choice(
            (
                {},
                {"recompute_granularity": "full"},
                {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": layers},
                {"recompute_granularity": "full", "recompute_method": "nested"},
                {"recompute_granularity": "full", "recompute_keep_core_attn": True},
                {"recompute_granularity": "selective", "recompute_modules": ["norm", "attn"]},
                {"recompute_granularity": "full", "cpu_offloading_activations": True},
                {"cpu_offloading_num_layers": 1},
                {"attention_backend": "math"},
                {"fused_linear_cross_entropy": False},
            )
        )
    )
    if not has_experts and not options and draw.maybe(0.5):
        # Not cpu_offloading_weights: on a CPU a checkpoint's numpy views keep storages from being freed.
        options = dict(draw.choice(({"mlp_tile_tokens": 5}, {"attention_head_groups": 2})))
    return options


def draw_sharding(draw: Draw, common: dict[str, Spec], other: dict[str, Spec], replicas: int) -> None:
    """Choose the ZeRO stage of the second run, and where and when its states are updated."""
    kind: Any = draw.choice(("none", "zero1", "zero2", "zero3", "overlap", "offload", "in forward", "in backward"))
    if kind == "zero3" and replicas == 1:
        kind = "zero2"
    if kind in ("none", "zero1", "zero2", "zero3"):
        other["data_parallel"]["sharding"] = kind
    if kind == "overlap":
        other["optimizer"]["overlap_grad_reduce"] = True
    if kind in ("offload", "in forward"):
        other["optimizer"] |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": draw.choice((0.3, 1.0)),
            "optimizer_update_in_forward": kind == "in forward",
        }
    if kind == "in backward":
        common["optimizer"]["clip_grad"] = 0.0
        common["data"]["global_batch_size"] = 4
        if 4 % replicas == 0:
            common["data"]["micro_batch_size"] = other["data"]["micro_batch_size"] = 4 // replicas
        other["optimizer"]["in_backward"] = True
