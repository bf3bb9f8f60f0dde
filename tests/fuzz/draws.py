"""Draws specs: configurations of the library, and pairs of training runs that must be equal."""

from __future__ import annotations

import random
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

Spec = dict[str, Any]

TABLES = tomllib.loads(Path(__file__).with_name("draws.toml").read_text(encoding="utf-8"))
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEOX_PROJECTIONS = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")
STEPS = 5
"""Of a run of the program layer."""


class Draw(random.Random):
    """A random generator with the choices that draws make."""

    def maybe(self, probability: float) -> bool:
        """Return True with ``probability``."""
        return self.random() < probability

    def some(self, values: Any) -> list[Any]:
        """Return one or more of ``values``, in random order."""
        return self.sample(list(values), self.randint(1, len(values)))

    def options(self, *tables: str) -> Spec:
        """Return a value for each option of the tables in ``draws.toml``."""
        chosen = {name: self.choice(values) for table in tables for name, values in TABLES[table].items()}
        return {name: None if value == "null" else value for name, value in chosen.items()}


def draw_library(draw: Draw) -> Spec:
    """Return the spec of one configuration, most of which the library supports."""
    has_experts = draw.maybe(0.35)
    ranks = draw.choices((1, 2, 4), (3, 4, 3))[0]
    tensor = draw.choice([size for size in (1, 2, 4) if size <= ranks])
    replicas = ranks // tensor
    config = draw_config(draw, draw.choice(EXPERTS if has_experts else DENSE), tensor)
    dtype = draw.choices(("float64", "float32", "bfloat16"), (6, 2, 0 if has_experts else 2))[0]
    spec: Spec = {
        "layer": "library",
        "seed": draw.randrange(10**6),
        "ranks": ranks,
        "tensor": tensor,
        "sequence": tensor > 1 and draw.maybe(0.6),
        "expert": draw.choice([size for size in (1, 2, 4) if size <= replicas]) if has_experts else 1,
        "dtype": dtype,
        "config": config,
        "lora": draw_lora(draw, config["model_type"]) if not has_experts and draw.maybe(0.2) else {},
        "moe": {},
        "memory": draw_memory(draw, config),
        "batch": draw_batch(draw, tensor),
        "steps": draw.choice((2, 3)),
        "files": draw.maybe(0.25) and dtype != "float64",
        "loss_bytes": draw.choice((1, 1 << 28)),
    }
    if has_experts:
        spec["moe"] = draw_moe(draw, spec)
    spec["optimizer"] = draw_optimizer(draw, spec, replicas)
    if spec["optimizer"]["kind"] == "in_backward":
        spec["batch"]["micro_batches"] = 1
    if draw.maybe(0.2) and not has_experts:
        add_fp8(draw, spec)
    if ranks > 1 and draw.maybe(0.2):
        add_stages(draw, spec)
    return spec


def add_stages(draw: Draw, spec: Spec) -> None:
    """Divide the layers of a draw into the stages of a pipeline, with techniques that these support."""
    config, ranks = spec["config"], spec["ranks"]
    size = draw.choice([n for n in (2, 4) if n <= ranks])
    tensor = spec["tensor"] = min(spec["tensor"], ranks // size)
    replicas = ranks // size // tensor
    spec["sequence"] = spec["sequence"] and tensor > 1
    spec["expert"] = min(spec["expert"], replicas)
    chunks = draw.choice((1, 2))
    layers = config["num_hidden_layers"] = draw.randint(chunks * size, chunks * size + 3)
    layout = None
    if draw.maybe(0.5):
        ends = [0, *sorted(draw.sample(range(1, layers), chunks * size - 1)), layers]
        layout = [end - start for start, end in pairwise(ends)]
    spec["stages"] = {"size": size, "chunks": chunks, "layout": layout}
    count = draw.randint(1, 2 * size + 1)
    spec["batch"]["micro_batches"] = count if chunks == 1 else draw.choice((1, 2)) * size
    # Stage 0 alone refuses positions with frequencies that depend on the length, and only in its forward.
    if config["rope_parameters"]["rope_type"] == "dynamic" and spec["batch"]["kind"] == "positions":
        spec["batch"]["kind"] = "plain"
    # A technique of all layers: ranks have different numbers of them.
    memory = spec["memory"]
    for option in ("cpu_offloading_weights", "cpu_offloading_activations", "recompute_method", "recompute_num_layers"):
        memory.pop(option, None)
    memory["cpu_offloading_num_layers"] = 0
    # Refused in the forward of the first stage, for which the others wait.
    if spec["lora"]:
        memory.pop("mlp_tile_tokens", None)
        memory.pop("attention_head_groups", None)
    kinds = ["zero1", "none", *(["torch", "adamw"] if spec["dtype"] != "bfloat16" else [])]
    if spec["moe"]:
        spec["moe"]["moe_router_load_balancing_type"] = draw.choice(("aux_loss", "seq_aux_loss"))
    options = spec["optimizer"]
    spec["optimizer"] = {name: options[name] for name in draw.options("optimizer")} | {"kind": draw.choice(kinds)}


def add_fp8(draw: Draw, spec: Spec) -> None:
    """Let the layers of a draw have float8 operands, and give it sizes and techniques that these support, mostly."""
    config, memory = spec["config"], spec["memory"]
    usual = not draw.maybe(0.1)
    # Matmuls are in fp32 at most.
    spec["dtype"] = "float32" if spec["dtype"] == "float64" else spec["dtype"]
    layers = config["num_hidden_layers"]
    bf16 = draw.choice([n for n in (0, 0, 1, 2) if not usual or 2 * n < layers])
    spec["fp8"] = {**draw.options("fp8"), "first_last_layers_bf16": bf16}
    if not usual:
        return
    sizes = draw.options("fp8_sizes")
    if config["model_type"] == "gpt_neox":
        sizes["hidden_size"] = sizes.pop("head_dim") * sizes["num_attention_heads"]
    else:
        sizes["num_key_value_heads"] = draw.choice((2, 4))
    config |= sizes
    for option in ("mlp_tile_tokens", "attention_head_groups"):
        memory.pop(option, None)


def draw_config(draw: Draw, model_type: str, tensor: int) -> Spec:
    """Return a Hugging Face config, most of which ``tensor`` ranks can share."""
    fits = not draw.maybe(0.05)
    groups = draw.choice([g for g in (1, 2, 3, 4, 6) if not fits or g % tensor == 0 or tensor % g == 0])
    heads = groups * draw.choice([m for m in (1, 2, 3, 4) if not fits or groups * m % tensor == 0])
    multiple = tensor if fits else 1
    config: Spec = {"model_type": model_type, "num_attention_heads": heads, **draw.options("model", model_type)}
    config["intermediate_size"] = draw.randint(20, 80) // multiple * multiple
    config["rope_parameters"] = dict(draw.options("rope")["parameters"])
    if model_type == "gpt_neox":
        # transformers rotates an even number of dimensions alone, and divides by zero with two of them and dynamic.
        head_size, share = draw.choice(
            [(d, s) for d in (4, 5, 6, 8, 12) for s in (0.25, 0.5, 0.75, 1.0) if d * s % 2 == 0 and d * s > 2]
        )
        config |= {"hidden_size": heads * head_size, "rotary_pct": share}
        config["rope_parameters"]["partial_rotary_factor"] = share
    else:
        # transformers demands a multiple of the heads, although heads may have another size.
        hidden = heads * -(-draw.choice((32, 36, 40, 50, 64, 96)) // heads)
        config |= {"hidden_size": hidden, "num_key_value_heads": groups, **draw.options("heads")}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        # One layer at least has experts.
        config["num_hidden_layers"] = max(2, config["num_hidden_layers"])
    if draw.maybe(0.25):
        stray = draw.options("stray")
        names = [name for name in stray if name not in config and name not in own_keys(model_type)]
        config |= {name: stray[name] for name in draw.sample(names, draw.randint(1, 3))}
    return config


def own_keys(model_type: str) -> set[str]:
    """Return the options that transformers' class of ``model_type`` has: those are not stray."""
    from transformers import CONFIG_MAPPING

    return set(CONFIG_MAPPING[model_type]().to_dict())


def draw_moe(draw: Draw, spec: Spec) -> Spec:
    """Return options of the routers and experts, about which the model's config is silent."""
    config = spec["config"]
    options = draw.options("experts")
    if options["moe_router_load_balancing_type"] == "none":
        options["moe_aux_loss_coeff"] = 0.0
    if draw.maybe(0.2):
        options["moe_expert_block_size"] = draw.choice((2, 4, 8))
        if not draw.maybe(0.1):
            options["moe_token_dispatcher_type"] = "allgather"
    elif draw.maybe(0.3):
        # As large as the number of experts: room for all tokens, so that none is dropped.
        options["moe_expert_capacity_factor"] = float(config.get("num_local_experts") or config["num_experts"])
        options["moe_pad_expert_input_to_capacity"] = draw.maybe(0.5)
    if draw.maybe(0.2):
        options["moe_router_dtype"] = "fp64" if spec["dtype"] == "float64" else "fp32"
    return options


def draw_memory(draw: Draw, config: Spec) -> Spec:
    """Return memory techniques; nine of ten draws keep to the rules for what goes together."""
    layers = config["num_hidden_layers"]
    has_experts = config["model_type"] in EXPERTS
    usual = not draw.maybe(0.1)
    options = draw.options("memory")
    granularity = options["recompute_granularity"]
    offloaded = draw.randint(1, layers) if draw.maybe(0.3) else 0
    recomputed = layers
    if offloaded and not has_experts and draw.maybe(0.4):
        options["cpu_offloading_weights"] = True
    elif offloaded and granularity == "full" and draw.maybe(0.5):
        options["cpu_offloading_activations"] = True
    elif granularity == "full":
        # Layers that offload their activations are not recomputed.
        offloaded = min(offloaded, layers - 1) if usual else offloaded
        recomputed = layers - offloaded
    options["cpu_offloading_num_layers"] = offloaded
    if granularity == "selective":
        options |= draw_selective(draw, layers, has_experts=has_experts, usual=usual)
    if granularity == "full":
        options |= draw_full(draw, max(1, recomputed), usual=usual)
    modules = set(options.get("recompute_modules", ()))
    if not (usual and (has_experts or {"mlp", "mlp_act"} & modules)) and draw.maybe(0.25):
        options["mlp_tile_tokens"] = draw.choice((1, 4, 7, 16))
    keeps_results = options.get("recompute_keep_core_attn") or {"attn", "core_attn"} & modules
    if not (usual and (has_experts or keeps_results)) and draw.maybe(0.25):
        options["attention_head_groups"] = draw.choice((1, 2, 2, 3))
    return options


def draw_selective(draw: Draw, layers: int, *, has_experts: bool, usual: bool) -> Spec:
    """Return modules to recompute."""
    names = ["core_attn", "attn", "norm", *(["moe"] if has_experts else [])]
    if not (has_experts and usual):
        names += ["mlp_act", "mlp"]
    options: Spec = {"recompute_modules": draw.some(names)}
    if draw.maybe(0.3):
        options |= {"recompute_method": "block", "recompute_num_layers": draw.randint(1, layers)}
    return options


def draw_full(draw: Draw, layers: int, *, usual: bool) -> Spec:
    """Return which of ``layers`` layers are recomputed, and how."""
    options: Spec = {}
    method = draw.choice((None, "uniform", "block", "nested"))
    if method is not None:
        fits = usual and method != "block"
        number = draw.choice([n for n in range(1, layers + 1) if not fits or layers % n == 0])
        options |= {"recompute_method": method, "recompute_num_layers": number}
    if method != "nested" and draw.maybe(0.2):
        options["recompute_keep_core_attn"] = True
        if usual:
            options["attention_backend"] = "sdpa"
    return options


def draw_batch(draw: Draw, tensor: int) -> Spec:
    """Return the shape of the micro-batches, what masks them, and which labels are trained."""
    multiple = 1 if draw.maybe(0.05) else tensor
    return {**draw.options("batch"), "length": max(2, multiple, draw.randint(2, 24) // multiple * multiple)}


def draw_lora(draw: Draw, model_type: str) -> Spec:
    """Return the options of adapters."""
    targets = NEOX_PROJECTIONS if model_type == "gpt_neox" else PROJECTIONS
    return {**draw.options("lora"), "target_modules": draw.some(targets)}


def draw_optimizer(draw: Draw, spec: Spec, replicas: int) -> Spec:
    """Return the class of the optimizer and its options."""
    kinds = ["zero1", "none", "nxd"]
    kinds += ["zero2", "zero3"] if replicas > 1 else []
    kinds += ["torch", "adamw", "in_backward"] if spec["dtype"] != "bfloat16" else []
    kinds += ["offload"] if spec["dtype"] != "float64" else []
    kind = draw.choice(kinds)
    options: Spec = {"kind": kind, **draw.options("optimizer")}
    if kind in ("torch", "adamw") and options["clip"] is not None and draw.maybe(0.3):
        options["norm"] = "inf"
    if kind == "in_backward":
        options["clip"] = None
    if kind == "zero3":
        options["reshard_after_forward"] = draw.maybe(0.7)
    if kind == "nxd":
        options["zero_one_enabled"] = draw.maybe(0.5)
    if kind == "offload":
        options["fraction"] = draw.choice((0.0, 0.4, 1.0))
        options["remainders"] = spec["dtype"] == "bfloat16" and draw.maybe(0.3)
        options["sharded"] = draw.maybe(0.5)
        options["in_forward"] = draw.maybe(0.5) and not (options["sharded"] and replicas > 1)
    return options


def draw_program(draw: Draw) -> Spec:
    """Return the spec of a pair: a run on one rank, and one that shares its work in another way."""
    config = draw_program_model(draw)
    has_experts = config["model_type"] in EXPERTS
    ranks = draw.choice((1, 2, 2, 4))
    tensor = draw.choice([size for size in (1, 2) if size <= ranks])
    replicas = ranks // tensor
    lora = draw_lora(draw, config["model_type"]) if not has_experts and draw.maybe(0.25) else {}
    optimizer = draw.options("program_optimizer", *([] if lora else ["program_groups"]))
    # A decay ends at the last step also in a run that stops before it; a warm-up must have ended there.
    optimizer |= {"warmup_steps": 0} if optimizer["lr_schedule"] == "constant" else {"decay_steps": STEPS}
    common: dict[str, Spec] = {
        "data": draw.options("program_data", *(["program_chats"] if draw.maybe(0.3) else [])),
        "optimizer": optimizer,
        "trainer": {"seed": draw.randrange(1000), "save_interval": 0, "val_check_interval": draw.choice((0, 2))},
        "lora": lora,
        "moe": draw.options("program_routers") if has_experts else {},
    }
    if common["moe"].get("moe_router_load_balancing_type") == "none":
        common["moe"]["moe_aux_loss_coeff"] = 0.0
    sequence = tensor > 1 and draw.maybe(0.7)
    expert = draw.choice([n for n in (1, 2) if has_experts and replicas % n == 0] or [1])
    other: dict[str, Spec] = {
        "parallel": {
            "tensor_model_parallel_size": tensor,
            "sequence_parallel_enabled": sequence,
            "expert_model_parallel_size": expert,
        },
        "data_parallel": {},
        "data": {},
        "optimizer": {},
        "memory": draw.options("program_memory")["techniques"],
        "trainer": {"log_every_n_steps": draw.choice((1, 2, 3)), "async_save": draw.maybe(0.2)},
    }
    draw_sharding(draw, common, other, replicas)
    if draw.maybe(0.2) and not has_experts:
        add_program_fp8(draw, config, common, other)
    formats = [draw.options("program_sharding")["formats"] for _ in range(2)]
    return {
        "layer": "program",
        "config": config,
        "documents": {"seed": draw.randrange(1000), "number": draw.choice((40, 120))},
        "formats": ["text", "text"] if "format" not in common["data"] and draw.maybe(0.1) else formats,
        "common": common,
        "ranks": ranks,
        "other": other,
        # An update in backward keeps a resumed run from having several micro-batches.
        "stop_after": None if "in_backward" in other["optimizer"] else draw.choice((None, None, 1, 2, 3)),
        "resumed_on": draw.choice((1, 2)),
    }


def add_program_fp8(draw: Draw, config: Spec, common: dict[str, Spec], other: dict[str, Spec]) -> None:
    """Let both runs have float8 operands, on some with frozen weights that are stored so."""
    common["trainer"] |= {**draw.options("program_fp8"), "first_last_layers_bf16": 0}
    if config["num_hidden_layers"] == 3:
        common["trainer"]["first_last_layers_bf16"] = draw.choice((0, 1))
    if common["lora"] and draw.maybe(0.5):
        common["lora"]["base_dtype"] = "fp8"
        common["trainer"]["fp8_recipe"] = "tensorwise"
        if other["data_parallel"].get("sharding") == "zero3":
            other["data_parallel"]["sharding"] = "zero2"
    # Multiples of 16 on each of two ranks.
    config |= {"hidden_size": 16 * config["num_attention_heads"], "intermediate_size": 64}
    for option in ("mlp_tile_tokens", "attention_head_groups"):
        other["memory"].pop(option, None)


def draw_program_model(draw: Draw) -> Spec:
    """Return the overrides of a random model."""
    config = draw.options("program_model")
    model_type, heads = config["model_type"], config["num_attention_heads"]
    config["hidden_size"] = 8 * heads
    if model_type != "gpt_neox":
        config["num_key_value_heads"] = draw.choice((2, heads))
    if model_type == "mistral":
        config["sliding_window"] = draw.choice((None, 5))
    if model_type == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        config |= draw.options("program_experts")
    if model_type == "qwen3_moe":
        del config["shared_expert_intermediate_size"]
    return config


def draw_sharding(draw: Draw, common: dict[str, Spec], other: dict[str, Spec], replicas: int) -> None:
    """Choose the batch size and ZeRO stage of the second run, and where and when its states are updated."""
    # Losses that are means over the tokens of a micro-batch depend on its rows.
    routers = common["moe"]
    if routers.get("moe_router_load_balancing_type") not in ("aux_loss", "hf_aux_loss") and not routers.get(
        "moe_z_loss_coeff"
    ):
        fitting = [n for n in (1, 2, 4) if common["data"]["global_batch_size"] % (n * replicas) == 0]
        other["data"]["micro_batch_size"] = draw.choice(fitting)
    kind: Any = draw.options("program_sharding")["kind"]
    if kind == "zero3" and replicas == 1:
        kind = "zero2"
    if kind in ("none", "zero1", "zero2", "zero3"):
        other["data_parallel"]["sharding"] = kind
    if kind == "overlap":
        other["optimizer"]["overlap_grad_reduce"] = True
    if kind in ("offload", "in forward"):
        other["optimizer"] |= {
            "optimizer_offload_fraction": draw.choice((0.3, 1.0)),
            "optimizer_update_in_forward": kind == "in forward",
        }
    if kind == "in backward":
        # One backward per step, in both runs: the losses of routers are of micro-batches.
        common["optimizer"]["clip_grad"] = 0.0
        common["data"] |= {"global_batch_size": 4, "micro_batch_size": 4 // replicas}
        other["data"]["micro_batch_size"] = 4 // replicas
        other["optimizer"]["in_backward"] = True
