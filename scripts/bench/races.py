"""The races of the performance tables: benchmarks, their options and peers, by number of GPUs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

TRAIN_STEP = "scripts.bench.train_step"
OURS = ("ours", "ours, CUDA graph")
LIGER = ("liger", "liger, flash4")
HF = ("hf", "hf, flash4")
DTENSOR = ("dtensor compiled", "dtensor compiled, flash4")
# Liger's own experts try tiles for minutes: last.
EXPERT_PEERS = ("hf", "hf compiled", "liger, grouped_mm", "liger, grouped_mm, compiled", "liger compiled")


@dataclass(frozen=True)
class Race:
    """Benchmark to run.

    Args:
        name: name for ``--only`` and for the log.
        module: module of the benchmark.
        arguments: options of the module.
        variables: environment variables of its process.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def command(self, gpus: int, *, append: bool, rows: Path | None, traces: Path | None) -> list[str]:
        """Return the command that runs the race on ``gpus`` GPUs."""
        # Without a launcher a single process has no process group, so that neither the rendezvous
        # nor collectives of size 1 are part of what is measured.
        launcher: list[str] = []
        if gpus > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(gpus)]
        options: list[str] = []
        if append:
            options.append("--append")
        if rows:
            options += ["--csv", str(rows / f"{self.module.rpartition('.')[2]}.csv")]
        if traces and self.module == TRAIN_STEP:
            options += ["--traces", str(traces)]
        return [sys.executable, *launcher, "-m", self.module, *self.arguments, *options]


def step(name: str, model: str, tokens: int, *variants: str, options: str = "") -> Race:
    """Return a race of full training steps."""
    # --variants takes all words after it, so it must be the last option.
    shape = ("--model", model, "--tokens", str(tokens))
    return Race(name, TRAIN_STEP, (*shape, *options.split(), "--variants", *variants))


# Of the memory options in these races only ``--recompute full`` applies to the peers, which then
# recompute every layer; the others are of ours alone (``train_step`` explains them).
KEEP = "--recompute full --keep-core-attn --in-backward"
HEADS = (
    Race(
        "head-8k",
        "scripts.bench.linear_cross_entropy",
        ("--heads", "llama3-8b", "gpt-neox-20b", "--tokens", "8192"),
    ),
    Race(
        "head-32k",
        "scripts.bench.linear_cross_entropy",
        ("--heads", "llama3-8b", "--tokens", "32768"),
    ),
)


# Activations of the longest sequences and states on their way fill the device: LLaMA-3-8B with
# 393,216 tokens runs out of memory with 31 GiB in fragments without it, at 107 GiB allocated.
EXPANDABLE = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)


def states(name: str, model: str, tokens: int, *variants: str, options: str = "") -> Race:
    """Return a race of steps with the optimizer's states on the host."""
    shape = ("--model", model, "--tokens", str(tokens), "--in-forward", "--read-loss")
    arguments = (*shape, *options.split(), "--variants", *variants)
    return Race(name, "scripts.bench.state_offload", arguments, variables=EXPANDABLE)


def long_states(name: str, model: str, tokens: int, options: str) -> Race:
    """Return ``states`` of ours without peer memory, whose four slots of a full activation each would fill the GPUs."""
    race = states(name, model, tokens, "ours", options=options)
    return replace(race, variables=(*race.variables, ("NXD_MEMOPT_PEER_MEMORY", "0")))


def memory(*options: str) -> str:
    """Return ``--memory`` for each of ``options``."""
    return " ".join(f"--memory {option}" for option in options)


LIGER4 = "liger, flash4"
FULL = "recompute_granularity=full"
NORM_MLP = ("recompute_granularity=selective", "recompute_modules=[norm,mlp]")
KEPT = (FULL, "recompute_keep_core_attn=true")
TILES = "mlp_tile_tokens=32768"
ONE_STEP = "--steps 1 --warm-up-steps 1"
# Device memory between steps is what the memory options leave: the longer the sequence, the less of
# it holds states on their way, and from 64K tokens on the link is faster than forward anyway.
STATES = (
    states("llama3-8b-states-8k", "llama3-8b", 8192, "ours", options="--staging-gib 48"),
    states("llama3-8b-states-8k-remainders", "llama3-8b", 8192, "ours", options="--remainders --staging-gib 48"),
    states("llama3-8b-states-16k", "llama3-8b", 16384, "ours", options="--staging-gib 60"),
    states(
        "llama3-8b-states-32k",
        "llama3-8b",
        32768,
        "ours",
        LIGER4,
        options="--remainders --staging-gib 26 "
        + memory(*NORM_MLP, "recompute_method=block", "recompute_num_layers=10"),
    ),
    states("llama3-8b-states-64k", "llama3-8b", 65536, "ours", LIGER4, options=f"--staging-gib 4 {memory(*NORM_MLP)}"),
    states(
        "llama3-8b-states-128k",
        "llama3-8b",
        131072,
        "ours",
        LIGER4,
        options=f"--staging-gib 12 --warm-up-tokens 32768 {ONE_STEP} {memory(*KEPT)}",
    ),
    states(
        "llama3-8b-states-256k",
        "llama3-8b",
        262144,
        "ours",
        LIGER4,
        options=f"--staging-gib 2 --warm-up-tokens 32768 {ONE_STEP} "
        + memory(
            FULL,
            "recompute_keep_core_attn=20",
            "cpu_offloading_activations=true",
            "cpu_offloading_num_layers=8",
            TILES,
        ),
    ),
    states(
        "llama3-8b-states-384k",
        "llama3-8b",
        393216,
        "ours",
        options=f"--staging-gib 2 --warm-up-tokens 32768 {ONE_STEP} "
        + memory(FULL, "cpu_offloading_activations=true", "cpu_offloading_num_layers=9", TILES),
    ),
    # Every tensor of 1,048,576 tokens, with attention within documents.
    states(
        "llama3-8b-states-1m",
        "llama3-8b",
        1048576,
        "ours",
        options="--staging-gib 2 --document-tokens 8192 --steps 1 --warm-up-steps 0 "
        + memory(
            FULL,
            "recompute_method=nested",
            "recompute_num_layers=5",
            "cpu_offloading_activations=true",
            "cpu_offloading_num_layers=15",
            "attention_head_groups=8",
            TILES,
        ),
    ),
    # One of its layers, with attention over all tokens.
    states(
        "llama3-8b-1l-states-1m",
        "llama3-8b-1l",
        1048576,
        "ours",
        options=f"--staging-gib 2 --warm-up-tokens 32768 {ONE_STEP} {memory(FULL, 'attention_head_groups=8', TILES)}",
    ),
    states(
        "llama3-8b-states-8k-80gib",
        "llama3-8b",
        8192,
        "ours",
        options=f"--cap-gib 80 --remainders --fraction 0.36 --staging-gib 3 {memory(*NORM_MLP)}",
    ),
    # fp32 states at a size whose peers' fit 128 GiB of host memory.
    states(
        "llama3.2-3b-states-8k",
        "llama3.2-3b",
        8192,
        "ours",
        "fsdp2, flash4",
        "deepspeed, flash4",
        options="--staging-gib 24",
    ),
    # FSDP2 has 16 bytes per parameter on the host with fp32 states, 120 GiB here, and 8 with bf16.
    states(
        "llama3-8b-states-8k-fsdp2",
        "llama3-8b",
        8192,
        "ours",
        "fsdp2 bf16, flash4",
        options="--staging-gib 48",
    ),
)
WEIGHTS = step(
    "llama3-8b-32k-weights",
    "llama3-8b",
    32768,
    "ours",
    options="--recompute full --in-backward --cap-gib 64 "
    + memory("cpu_offloading_weights=true", "cpu_offloading_num_layers=16"),
)
ONE_GPU = (
    step("llama3-8b-8k", "llama3-8b", 8192, *OURS, *LIGER, *HF),
    step("llama3-8b-32k-64gib", "llama3-8b", 32768, "ours", *LIGER, options=f"{KEEP} --offload-layers 6"),
    step(
        "llama3-8b-32k-125gib",
        "llama3-8b",
        32768,
        "ours",
        *LIGER,
        options="--recompute full --recompute-layers 0 --in-backward --offload-layers 12",
    ),
    *HEADS,
    Race("elementwise", "scripts.bench.elementwise", ()),
    Race("attention", "scripts.bench.attention", ()),
    step("llama3-8b-2k", "llama3-8b", 2048, *OURS, *LIGER),
    step("gpt-neox-20b-2k", "gpt-neox-20b", 2048, "ours", *HF, options=KEEP),
    step("gpt-neox-20b-8k", "gpt-neox-20b", 8192, "ours", *HF, options=KEEP),
    step(
        "gpt-neox-20b-32k",
        "gpt-neox-20b",
        32768,
        "ours",
        *HF,
        options="--recompute full --in-backward --offload-layers 10",
    ),
    *STATES,
    WEIGHTS,
    Race("moe-layers", "scripts.bench.moe_layer", ()),
    Race("moe-matmuls", "scripts.bench.moe_matmuls", ()),
    step("qwen3-moe-12l-8k", "qwen3-moe-12l", 8192, *OURS, *EXPERT_PEERS),
    step("mixtral-4l-8k", "mixtral-4l", 8192, "ours", *EXPERT_PEERS),
)


def sharded(name: str, states: str, options: str, *variants: str) -> Race:
    """Return a race of LLaMA-3-8B at ZeRO-3, 8,192 tokens on each replica, by default against FSDP2."""
    shape = ("--model", "llama3-8b", "--tokens", "8192", "--states", states, *options.split())
    variants = variants or ("ours", LIGER4, "liger compiled, flash4")
    return Race(name, "scripts.bench.sharded_step", (*shape, "--variants", *variants), variables=EXPANDABLE)


def experts(name: str, model: str, options: str = "") -> Race:
    """Return a race of ours with experts, 8,192 tokens per sequence, with both dispatchers."""
    return step(name, model, 8192, "ours", "ours, all-to-all", options=options)


# 16 bytes per parameter of GPT-NeoX-20B are more than two GPUs have: 306 GiB.
NEOX_STATES = "--accumulation 4 --steps 3 --warm-up-steps 2"
SEVERAL_GPUS = (
    step("gpt-neox-20b-8k", "gpt-neox-20b", 8192, *OURS, *DTENSOR),
    step("llama3-8b-8k", "llama3-8b", 8192, *OURS, *DTENSOR, "dtensor compiled, async TP"),
    *HEADS,
    # At 2,048 tokens the host is the limit and compiling may not pay: the eager peer takes part.
    step("llama3-8b-2k", "llama3-8b", 2048, *OURS, "dtensor", *DTENSOR),
    step("gpt-neox-20b-2k", "gpt-neox-20b", 2048, *OURS, "dtensor", *DTENSOR),
    step("llama3-8b-32k", "llama3-8b", 32768, *OURS, *DTENSOR),
    step(
        "gpt-neox-20b-32k",
        "gpt-neox-20b",
        32768,
        *OURS,
        "dtensor",
        *DTENSOR,
        options="--recompute full --recompute-layers 0",  # the peers', which do not fit without
    ),
    states(
        "gpt-neox-20b-states-8k",
        "gpt-neox-20b",
        8192,
        "ours",
        options=f"{NEOX_STATES} --remainders --fraction 0.34 --staging-gib 6",
    ),
    states(
        "gpt-neox-20b-states-8k-80gib",
        "gpt-neox-20b",
        8192,
        "ours",
        options=f"{NEOX_STATES} --fraction 0.95 --staging-gib 5",
    ),
    states(
        "gpt-neox-20b-states-8k-fp32-sums",
        "gpt-neox-20b",
        8192,
        "ours",
        options=f"{NEOX_STATES} --fp32-sums --remainders --fraction 0.55 --staging-gib 5",
    ),
    # Five recomputed layers are what is left to nine tenths of the peer's memory.
    sharded(
        "llama3-8b-zero3-8k",
        "fp32",
        "--recompute none " + memory(*NORM_MLP, "recompute_method=block", "recompute_num_layers=5"),
    ),
    experts("qwen3-moe-12l-8k", "qwen3-moe-12l"),
    experts("qwen3-moe-12l-8k-ep2", "qwen3-moe-12l", "--expert-parallel 2"),
    experts("mixtral-4l-8k", "mixtral-4l"),
    experts("mixtral-4l-8k-ep2", "mixtral-4l", "--expert-parallel 2"),
    # For GPUs of 80 GiB: with fp32 states every layer has to be recomputed.
    sharded("llama3-8b-zero3-8k-80gib", "fp32", "--recompute full"),
    sharded("llama3-8b-zero3-8k-bf16", "bf16", "--recompute none"),
)
FOUR_GPUS = (
    sharded("llama3-8b-zero3-8k-t2", "fp32", "--recompute none --tensor-parallel 2", "ours"),
    sharded("llama3-8b-zero3-8k-t2-kept", "fp32", "--recompute none --tensor-parallel 2 --keep-gathered", "ours"),
    experts("qwen3-moe-12l-8k-ep4", "qwen3-moe-12l", "--expert-parallel 4"),
    experts("mixtral-4l-8k-ep4", "mixtral-4l", "--expert-parallel 4"),
    # A step of about seven minutes: the states are on the devices, the inputs and attention's results
    # of half of the layers on the host.
    long_states(
        "llama3-8b-1m",
        "llama3-8b",
        1048576,
        f"--fraction 0 --warm-up-tokens 32768 {ONE_STEP} "
        + memory(*KEPT, "cpu_offloading_activations=true", "cpu_offloading_num_layers=16", TILES),
    ),
    # Every tensor, with attention within documents.
    long_states(
        "llama3-8b-states-3m",
        "llama3-8b",
        3145728,
        "--staging-gib 2 --document-tokens 8192 --steps 1 --warm-up-steps 0 "
        + memory(FULL, "recompute_method=nested", "recompute_num_layers=4", "cpu_offloading_activations=true", TILES),
    ),
)


def races(gpus: int) -> tuple[Race, ...]:
    """Return the races for a number of GPUs, the most important first."""
    if gpus == 1:
        return ONE_GPU
    if gpus % 4:
        return SEVERAL_GPUS
    return SEVERAL_GPUS + FOUR_GPUS
