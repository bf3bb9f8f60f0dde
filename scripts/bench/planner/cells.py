"""Training steps on one, two or four GPUs, named and drawn, whose plans are compared with measurements."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_memopt.architectures.configs import NAMED_CONFIGS
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.planner.hardware import GIB, Device, device_named
from nxd_memopt.planner.search.plan import Plan
from nxd_memopt.training.config.data_parallel import DataParallelConfig
from nxd_memopt.training.config.lora import LoraOptions
from nxd_memopt.training.config.train_config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.model import load_hf_config

DEVICE = "h200"  # decides which drawn cells fit, on every machine alike
LARGEST_HOST_GIB = 24  # page-locking takes 0.4 s per GiB
LARGEST_FRACTION = 0.97  # of the device's usable memory
TINY: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 2048,  # the states of an embedding of this size go to the host
}
TINY_TOKENS = 64  # a tiny cell has this fraction of a cell's tokens


@dataclass(frozen=True)
class Cell:
    """A training step.

    Args:
        name: describes the cell in a row.
        model: key of ``NAMED_CONFIGS``.
        layers: decoder layers, at most those of the model.
        tokens: S.
        precision: ``trainer.precision``.
        memory: options of the memory section.
        optimizer: options of the optimizer section.
        cuda_graph: forward and backward are one CUDA graph.
        micro_batch: B.
        accumulation: micro-batches per step.
        compile: ``trainer.compile``.
        tensor_parallel: T, with sequence parallelism from 2 on.
        data_parallel: D.
        sharding: ``data_parallel.sharding``.
        stages: ``pipeline_model_parallel_size``, and 1 or ``virtual_pipeline_model_parallel_size``.
        trainer: options of the trainer section that round to float8.
        lora: options of the lora section.
        seed: what the cell was drawn by; None for the named ones.
    """

    name: str
    model: str
    layers: int
    tokens: int
    precision: str = "bf16-true"
    memory: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    cuda_graph: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    compile: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    sharding: str = "none"
    stages: tuple[int, int] = (1, 1)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def config(self, *, tiny: bool = False) -> TrainConfig:
        """Return the configuration of the training program; ``tiny`` has small sizes and the same options."""
        overrides = {**NAMED_CONFIGS[self.model], "num_hidden_layers": self.layers}
        tokens = self.tokens
        memory = dict(self.memory)
        if tiny:
            overrides |= {name: value for name, value in TINY.items() if name in overrides}
            tokens = max(32, tokens // TINY_TOKENS)
            memory = {name: _tiny_option(name, value) for name, value in memory.items()}
        overrides["max_position_embeddings"] = max(overrides["max_position_embeddings"], tokens)
        return TrainConfig(
            # Ids are drawn, so that the tokenizer is not read.
            model=ModelConfig(config_overrides=overrides, tokenizer="none"),
            # Weights drawn on the device: 8 billion numbers from the CPU take a minute. Stages need the option.
            parallel=ParallelConfig(
                self.tensor_parallel,
                sequence_parallel_enabled=self.tensor_parallel > 1,
                use_cpu_initialization=self.stages[0] > 1,
                pipeline_model_parallel_size=self.stages[0],
                virtual_pipeline_model_parallel_size=self.stages[1] if self.stages[1] > 1 else None,
            ),
            data_parallel=DataParallelConfig(sharding=self.sharding),  # pyright: ignore[reportArgumentType]
            memory=MemoryConfig(**memory),
            lora=LoraOptions(**self.lora),
            data=DataConfig(
                seq_length=tokens,
                isolate_documents=False,
                micro_batch_size=self.micro_batch,
                global_batch_size=self.micro_batch * self.accumulation * self.data_parallel,
            ),
            # From 2^32 the first twenty steps of fp16 would all be skipped, and create no states.
            optimizer=OptimizerConfig(**self.optimizer, initial_loss_scale=1024.0),
            trainer=TrainerConfig(
                precision=self.precision,
                enable_cuda_graph=self.cuda_graph,
                compile=self.compile,  # pyright: ignore[reportArgumentType]
                **self.trainer,
            ),
        )

    def options(self) -> str:
        """Return what differs from the defaults, in one line."""
        options = {**self.memory, **self.optimizer, **self.trainer, **self.lora}
        words = [f"{name}={value}" for name, value in options.items()]
        if self.cuda_graph:
            words.append("cuda_graph")
        if self.compile:
            words.append(f"compile={self.compile}")
        if self.tensor_parallel > 1:
            words.append(f"T={self.tensor_parallel}")
        if self.data_parallel > 1:
            words.append(f"D={self.data_parallel} sharding={self.sharding}")
        if self.stages[0] > 1:
            words.append("P={} V={}".format(*self.stages))
        return " ".join(words)

    def seed_text(self) -> str:
        """Return the seed as in a row, empty without one."""
        if self.seed is None:
            return ""
        return str(self.seed)


def part_of(values: Sequence[int], text: str) -> Sequence[int]:
    """Return the part ``A:B`` of ``values``; without A from the start, without B to the end."""
    start, _, stop = text.partition(":")
    return values[int(start or 0) : int(stop or len(values))]


def _tiny_option(name: str, value: Any) -> Any:
    """Return an option's value for four layers and few tokens."""
    if name.endswith("num_layers"):
        return min(value, 2)
    return max(8, value // TINY_TOKENS) if name == "mlp_tile_tokens" else value


def plan_of(cell: Cell, device: Device | None = None, *, tiny: bool = False) -> Plan:
    """Return the plan of a cell on ``device``, by default this machine's, whose ranks must be those of the cell.

    Raises:
        ValueError: an option of the cell is not planned.
    """
    config = cell.config(tiny=tiny)
    ranks = None if device is None else cell.tensor_parallel * cell.data_parallel * cell.stages[0]
    return planned(config, load_hf_config(config.model, config.moe), device, ranks=ranks)[1]


FULL: dict[str, Any] = {"recompute_granularity": "full"}
KEPT: dict[str, Any] = {**FULL, "recompute_keep_core_attn": True}
STREAMED: dict[str, Any] = {**FULL, "cpu_offloading_activations": True}
TILES: dict[str, Any] = {"mlp_tile_tokens": 32768}


def selective(*modules: str, **options: Any) -> dict[str, Any]:
    """Return options that recompute ``modules``."""
    return {"recompute_granularity": "selective", "recompute_modules": modules, **options}


def chunks(method: str, layers: int, **options: Any) -> dict[str, Any]:
    """Return options of full recompute by a method with a number of layers."""
    return {**FULL, "recompute_method": method, "recompute_num_layers": layers, **options}


def states_on_host(fraction: float, **options: Any) -> dict[str, Any]:
    """Return options that keep a part of the optimizer's states on the host."""
    return {"optimizer_offload_fraction": fraction, **options}


def _llama(name: str, tokens: int, layers: int = 32, **options: Any) -> Cell:
    return Cell(f"llama {name}", "llama-3-8b", layers, tokens, **options)


def _neox(name: str, tokens: int, layers: int = 22, **options: Any) -> Cell:
    return Cell(f"neox {name}", "gpt-neox-20b", layers, tokens, **options)


def _smollm(name: str, tokens: int, precision: str = "bf16-mixed", **options: Any) -> Cell:
    return Cell(f"smollm {name}", "smollm2-135m", 30, tokens, precision=precision, **options)


def _mixtral(name: str, tokens: int, layers: int = 4, **options: Any) -> Cell:
    return Cell(f"mixtral {name}", "mixtral-8x7b", layers, tokens, **options)


# States of LLaMA-3-8B in bf16 are 59.8 GiB; GPT-NeoX-20B's are 153 GiB, which 22 of its 44 layers halve.
NAMED = (
    _llama("2k", 2048),
    _llama("4k graph", 4096, cuda_graph=True),
    _llama("8k", 8192),
    _llama("8k accumulation", 8192, accumulation=2),
    _llama("8k two rows full", 8192, micro_batch=2, memory=FULL),
    _llama("16k norm mlp", 16384, memory=selective("norm", "mlp")),
    _llama("16k kept", 16384, memory=KEPT),
    _llama("16k some kept", 16384, memory={**KEPT, "recompute_keep_core_attn": 10}),
    _llama("32k full", 32768, memory=FULL),
    _llama("32k uniform", 32768, memory=chunks("uniform", 4)),
    _llama("16k block", 16384, memory=chunks("block", 20)),
    _llama("16k layers on host", 16384, memory={**FULL, "cpu_offloading_num_layers": 4}),
    _llama("32k checkpoints on host", 32768, memory=STREAMED),
    _llama(
        "32k weights on host", 32768, memory={**FULL, "cpu_offloading_weights": True, "cpu_offloading_num_layers": 16}
    ),
    _llama("64k nested tiles", 65536, memory={**FULL, "recompute_method": "nested", **TILES}),
    _llama("8k mixed", 8192, 8, precision="bf16-mixed"),
    _llama("8k mixed graph", 8192, 8, precision="bf16-mixed", cuda_graph=True),
    _llama("8k half the states", 8192, 8, precision="bf16-mixed", optimizer=states_on_host(0.5)),
    _llama(
        "8k states in forward",
        8192,
        8,
        precision="bf16-mixed",
        optimizer=states_on_host(0.5, optimizer_update_in_forward=True),
    ),
    _llama("8k fp16", 8192, 8, precision="16-mixed"),
    _llama("4k all logits", 4096, 8, memory={"fused_linear_cross_entropy": False}),
    _llama("64k groups", 65536, 8, memory={**FULL, "attention_head_groups": 4}),
    _llama("128k kept tiles", 131072, 8, memory={**KEPT, **TILES}),
    _llama("128k nested on host", 131072, 8, memory={**STREAMED, "recompute_method": "nested", **TILES}),
    _neox("2k", 2048),
    _neox("2k graph", 2048, cuda_graph=True),
    _neox("8k", 8192),
    _neox("8k full", 8192, memory=FULL),
    _neox("2k full", 2048, 33, memory=FULL),
    _neox("16k norm mlp", 16384, memory=selective("norm", "mlp")),
    _neox("32k kept", 32768, memory=KEPT),
    _neox("32k checkpoints on host", 32768, memory=STREAMED),
    _smollm("2k", 2048),
    _smollm("8k graph", 8192, cuda_graph=True),
    _smollm("8k fp32", 8192, precision="32-true"),
    _smollm("32k fp32 full", 32768, precision="32-true", memory=FULL),
    _smollm("8k batch", 8192, micro_batch=2, accumulation=2),
    _smollm("64k mlp_act", 65536, memory=selective("norm", "mlp_act")),
    _smollm("128k full", 131072, memory=FULL),
    _mixtral("2k", 2048),
    _mixtral("8k", 8192),
    _mixtral("8k moe", 8192, memory=selective("norm", "moe")),
    _mixtral("8k mixed full", 8192, precision="bf16-mixed", memory=FULL),
    _mixtral("32k full", 32768, memory=FULL),
    _mixtral("32k checkpoints on host", 32768, memory=STREAMED),
)

_ON_SEVERAL = (
    _llama("2k", 2048),
    _llama("8k", 8192),
    _llama("8k graph", 8192, cuda_graph=True),
    _llama("16k mixed norm mlp", 16384, precision="bf16-mixed", memory=selective("norm", "mlp")),
    _llama("32k kept", 32768, memory=KEPT),
    _llama("32k layers on host", 32768, memory={**FULL, "cpu_offloading_num_layers": 4}),
    _llama("64k nested tiles", 65536, memory={**FULL, "recompute_method": "nested", **TILES}),
    _neox("2k", 2048, 44),
    _neox("2k graph", 2048, 44, cuda_graph=True),
    _neox("8k", 8192, 44),
    _neox("16k norm mlp", 16384, 44, memory=selective("norm", "mlp")),
    _neox("32k full", 32768, 44, memory=FULL),
    _mixtral("2k", 2048, 8),
    _mixtral("8k moe", 8192, 8, memory=selective("norm", "moe")),
)
_SHARDED = _llama("8k mixed D=2", 8192, 16, precision="bf16-mixed", data_parallel=2, sharding="zero1")
_SHARDED_MORE = (
    replace(_SHARDED, name="llama 8k mixed D=2 zero2", sharding="zero2"),
    replace(_SHARDED, name="llama 8k mixed D=2 zero2 full", sharding="zero2", memory=FULL, accumulation=2),
    replace(_SHARDED, name="llama 8k mixed D=2 zero3", sharding="zero3"),
    replace(_SHARDED, name="llama 8k mixed D=2 zero3 full", sharding="zero3", memory=FULL, accumulation=2),
    replace(_SHARDED, name="llama 8k mixed D=2 zero3 uniform", sharding="zero3", memory=chunks("uniform", 4)),
    replace(
        _SHARDED,
        name="llama 8k mixed D=2 overlapped",
        layers=12,
        sharding="none",
        memory=FULL,
        optimizer={"overlap_grad_reduce": True},
    ),
)
# SmolLM2's three heads of keys do not divide by two.
NAMED_ON = {
    1: NAMED,
    2: (
        *(replace(cell, name=f"{cell.name} T=2", tensor_parallel=2) for cell in _ON_SEVERAL),
        _SHARDED,
        *_SHARDED_MORE,
    ),
    4: (
        *(replace(cell, name=f"{cell.name} T=4", tensor_parallel=4) for cell in _ON_SEVERAL),
        replace(_SHARDED, name=f"{_SHARDED.name} T=2", tensor_parallel=2),
    ),
}
"""Number of GPUs -> the named cells."""


def named(ranks: int) -> tuple[Cell, ...]:
    """Return the named cells of ``ranks`` GPUs.

    Raises:
        ValueError: there are none.
    """
    if ranks not in NAMED_ON:
        raise ValueError(f"{ranks} ranks have no named cells: run one process, or two or four by torchrun")
    return NAMED_ON[ranks]


def drawn(count: int, seed: int, longest_s: float, ranks: int = 1) -> tuple[Cell, ...]:
    """Return ``count`` cells that ``seed`` draws, of those that fit H200s by plan.

    A cell whose plan is too large, or whose step is planned to take longer than ``longest_s``
    seconds, is drawn again. The ranks are tensor-parallel, the stages of a pipeline, or two of each.
    """
    generator = random.Random(seed)
    device = device_named(DEVICE)
    found: list[Cell] = []
    while len(found) < count:
        cell = _draw(generator, seed, len(found), ranks)
        try:
            plan = plan_of(cell, device)
        except ValueError:
            continue
        fits = plan.memory.reserved_bytes <= LARGEST_FRACTION * plan.usable_bytes
        if fits and plan.memory.host_bytes <= LARGEST_HOST_GIB * GIB and plan.time.step_s <= longest_s:
            found.append(cell)
    return tuple(found)


_STAGES_ON = {
    1: ((1, 1),),
    2: ((1, 1), (1, 1), (2, 1), (2, 2)),
    4: ((1, 1), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2)),
}


def _draw(generator: random.Random, seed: int, number: int, ranks: int) -> Cell:
    most_layers = {"llama-3-8b": 32, "gpt-neox-20b": 33, "smollm2-135m": 30, "mixtral-8x7b": 5}
    if ranks > 1:
        most_layers = {"llama-3-8b": 32, "gpt-neox-20b": 44, "mixtral-8x7b": 9}
    model = generator.choice(tuple(most_layers))
    most = most_layers[model]
    layers = most if generator.random() < 0.4 else generator.randint(max(1, most // 4), most)
    # Lengths from 2K to 128K, as many between 2K and 4K as between 64K and 128K.
    tokens = round(2 ** generator.uniform(11, 17) / 256) * 256
    precision = generator.choice(("bf16-true", "bf16-true", "bf16-mixed", "32-true", "16-mixed"))
    memory = generator.choice(_techniques(generator, layers, has_experts=model == "mixtral-8x7b"))
    optimizer: dict[str, Any] = {}
    if precision == "bf16-mixed" and generator.random() < 0.4:
        in_forward = generator.random() < 0.5
        optimizer = states_on_host(
            round(generator.random(), 2),
            optimizer_update_in_forward=in_forward,
            store_param_remainders=generator.random() < 0.5,
        )
    stages = generator.choice(_STAGES_ON[ranks])
    trainer: dict[str, Any] = {}
    if generator.random() < 0.25:
        trainer = generator.choice(({"fp8": "hybrid"}, {"fp8": "e4m3", "fp8_recipe": "rowwise"}))
    lora: dict[str, Any] = {}
    if generator.random() < 0.15:
        lora = {"lora_rank": generator.choice((8, 64))}
    can_be_graph = not any(name.startswith("cpu_offloading") for name in memory) and model != "mixtral-8x7b"
    return Cell(
        f"drawn {number}",
        model,
        layers,
        tokens,
        precision=precision,
        memory=memory,
        optimizer=optimizer,
        cuda_graph=can_be_graph and stages[0] == 1 and not optimizer and generator.random() < 0.25,
        micro_batch=generator.choice((1, 1, 1, 2, 3)),
        accumulation=generator.choice((1, 1, 2)) if stages[0] == 1 else generator.choice((1, 2, 4)) * stages[0],
        tensor_parallel=ranks // stages[0],
        stages=stages,
        trainer=trainer,
        lora=lora,
        seed=seed,
    )


def _techniques(generator: random.Random, layers: int, *, has_experts: bool) -> list[dict[str, Any]]:
    """Return the memory techniques of which one is drawn, with drawn numbers of layers."""
    some = generator.randint(1, layers)
    chunk = generator.choice([number for number in range(1, layers + 1) if layers % number == 0])
    found: list[dict[str, Any]] = [
        {},
        {},
        FULL,
        KEPT,
        {**KEPT, "recompute_keep_core_attn": some},
        STREAMED,
        {**STREAMED, "cpu_offloading_num_layers": some},
        {"cpu_offloading_num_layers": some},
        chunks("uniform", chunk),
        chunks("block", some),
        {**FULL, "recompute_method": "nested"},
        selective("norm"),
        selective("core_attn"),
        selective("attn", "norm"),
    ]
    if has_experts:
        return [*found, selective("moe"), selective("norm", "moe")]
    return [
        *found,
        selective("norm", "mlp", recompute_method="block", recompute_num_layers=some),
        selective("mlp_act"),
        {**FULL, "mlp_tile_tokens": generator.choice((4096, 16384, 32768))},
        {**FULL, "attention_head_groups": 2},
        {**FULL, "cpu_offloading_weights": True, "cpu_offloading_num_layers": some},
    ]
