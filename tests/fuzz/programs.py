"""The program layer: two training runs of a spec on real ranks, whose records and exported weights must agree."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from nxd_memopt.training.config import combinations
from tests.dist import pool
from tests.dist.test_fp8_models import without_rounding
from tests.dist.test_fp8_training import on_this_device
from tests.fuzz.draws import STEPS, Spec
from tests.fuzz.outcomes import FAILED, PASSED, REFUSED, Outcome
from tests.training import chats, runs

TIMEOUT_S = 180.0
# fp32 has 6e-8. Sums of some thousand numbers in another order, through up to 5 steps of AdamW.
LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-4
RECORDED = {"loss": LOSS, "held_out_loss": LOSS, "grad_norm": NORM, "load_balancing_loss": NORM, "z_loss": NORM}
CHUNK = 256  # elements of offloaded states that travel together


def run(spec: Spec) -> Outcome:
    """Run both; compare."""
    with tempfile.TemporaryDirectory() as name:
        one, two = Path(name) / "one", Path(name) / "two"
        if "base_dtype" in spec["common"]["lora"]:
            save_base(spec, Path(name) / "base")
        for number, directory in enumerate((one, two)):
            directory.mkdir()
            write(spec, directory, number)
        last = ("--trainer.max-steps", str(STEPS))
        first: tuple[str, ...] = last
        phases: list[tuple[Path, int, tuple[str, ...]]] = [(one, 1, last)]
        if spec["stop_after"] is not None:
            first = ("--trainer.max-steps", str(spec["stop_after"]))
            phases.append((two, spec["ranks"], first))
            phases.append((two, spec["resumed_on"], (*last, *plain_options(spec))))
        else:
            phases.append((two, spec["ranks"], first))
        for directory, ranks, options in phases:
            refusal = run_program(directory / "config.yaml", options, ranks)
            if refusal is not None:
                return refusal
        differences = compare(one / "run", two / "run")
    return Outcome(FAILED, "; ".join(differences)) if differences else Outcome(PASSED)


def save_base(spec: Spec, directory: Path) -> None:
    """Write random weights of the model of both runs, whose float8 weights are frozen."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {name: value for name, value in spec["config"].items() if name != "model_type"}
    torch.manual_seed(spec["documents"]["seed"])
    config = CONFIG_MAPPING[spec["config"]["model_type"]](**values)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@contextmanager
def float8_operands() -> Iterator[None]:
    """Let a CPU multiply small layers with float8 operands, which are fp32: a rounding would hide lost terms."""
    precision = [
        each for each in combinations.EXCLUDED if (each.option, each.other) == ("trainer.fp8", "trainer.precision")
    ]
    allowed = tuple(each for each in combinations.EXCLUDED if each not in precision)
    assert len(allowed) == len(combinations.EXCLUDED) - 1
    with on_this_device(), without_rounding(), mock.patch.object(combinations, "EXCLUDED", allowed):
        yield


def plain_options(spec: Spec) -> tuple[str, ...]:
    """Return options of a resumed run without tensor parallelism, on ``resumed_on`` ranks."""
    size = 2 if spec["resumed_on"] == 2 and spec["ranks"] == 1 else 1
    return (
        f"--parallel.tensor-model-parallel-size={size}",
        "--parallel.no-sequence-parallel-enabled",
        "--parallel.expert-model-parallel-size=1",
    )


def run_program(config: Path, options: tuple[str, ...], ranks: int) -> Outcome | None:
    """Run the program to its end on the pool's ranks; return the outcome if it is refused or fails."""
    try:
        reports = pool.run_on_ranks(run_rank, ranks, str(config), options, timeout_s=TIMEOUT_S)
    except pool.RankError as error:
        return Outcome(FAILED, f"{str(error).strip().splitlines()[-1]}\n{error}")
    refused = [report for report in reports if report is not None]
    if not refused:
        return None
    if len(refused) < len(reports):
        return Outcome(FAILED, f"refused on {len(refused)} of {len(reports)} ranks: {refused[0]}")
    return Outcome(REFUSED, refused[0])


def run_rank(config: str, options: tuple[str, ...]) -> str | None:
    """Run the program on this rank; return the message of a refusal."""
    from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
    from tests.fuzz.library_runs import simulated_device

    chunks = {"resident_elements": 100, "chunk_elements": CHUNK, "staging_bytes": 3 * 12 * CHUNK}
    uses_fp8 = "fp8:" in Path(config).read_text(encoding="utf-8")
    with (
        simulated_device(1 << 28),
        mock.patch.dict(OffloadedZero1Optimizer.__init__.__kwdefaults__, chunks),
        float8_operands() if uses_fp8 else nullcontext(),
    ):
        try:
            runs._run_rank(config, options)
        except ValueError as error:
            return str(error)
    return None


def write(spec: Spec, directory: Path, number: int) -> None:
    """Write data, tokenizer and configuration of one of the runs."""
    common, other = spec["common"], spec["other"] if number else {}
    sections: dict[str, Spec] = {name: {**common.get(name, {}), **other.get(name, {})} for name in {*common, *other}}
    is_chat = "train_on_input" in common["data"]  # an option of [program_chats]
    sections["data"]["dataset"] = write_data(spec, directory, spec["formats"][number], is_chat=is_chat)
    sections["model"] = {"config_overrides": spec["config"]}
    if "base_dtype" in spec["common"]["lora"]:
        sections["model"] = {"config_overrides": {}, "pretrained": str(directory.parent / "base")}
    sections["trainer"] |= {"output_dir": str(directory / "run"), "max_steps": STEPS}
    if "optimizer_offload_fraction" in sections["optimizer"]:
        sections["optimizer"]["optimizer_staging_gib"] = 3 * 12 * CHUNK / 2**30
    runs.write_config(directory, **sections)
    if is_chat:
        chats.tokenizer().save_pretrained(directory / "tokenizer")


def rows_of(spec: Spec, *, is_chat: bool) -> list[Spec]:
    """Return the documents, as rows of a file."""
    draw = random.Random(spec["documents"]["seed"])
    rows: list[Spec] = []
    for index in range(spec["documents"]["number"]):
        words = [f"{index} {draw.choice(('abc', 'xyz', 'ä€', 'hello'))}" for _ in range(draw.randint(1, 9))]
        if is_chat:
            rows.append(chats.turns(" ".join(words[:2]), " ".join(words[2:]) or "yes", "And?", f"no {index}"))
        else:
            rows.append({"text": " ".join(words)})
    return rows


def write_data(spec: Spec, directory: Path, kind: str, *, is_chat: bool) -> str:
    """Write the documents in one format; return the path."""
    rows = rows_of(spec, is_chat=is_chat)
    if kind == "text":
        path = directory / "data.txt"
        path.write_text("\n".join(row["text"] for row in rows), encoding="utf-8")
        return str(path)
    if kind == "jsonl":
        path = directory / "data.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)
    if kind == "json array":
        path = directory / "data.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        return str(path)
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        dataset.to_parquet(directory / "data.parquet")
        return str(directory / "data.parquet")
    dataset.save_to_disk(directory / "saved")
    return str(directory / "saved")


def compare(one: Path, two: Path) -> list[str]:
    """Return what differs in the records of the steps, the evaluations and the exported weights."""
    differences: list[str] = []
    for file in ("metrics.jsonl", "evaluation.jsonl"):
        paths = [each / file for each in (one, two)]
        if paths[0].exists() != paths[1].exists():
            return [f"only one run has {file}"]
        if not paths[0].exists():
            continue
        first, second = ({row["step"]: row for row in runs.rows(each, file)} for each in (one, two))
        # A run that was stopped has evaluated there too.
        if not set(first) <= set(second):
            return [f"{file}: steps {list(first)} and {list(second)}"]
        for a, b in ((row, second[step]) for step, row in first.items()):
            differences += [
                f"{file} step {a['step']}: {name} {a.get(name)} and {b.get(name)}"
                for name, allowed in RECORDED.items()
                if not _is_close(a.get(name), b.get(name), allowed)
            ]
    return differences or _different_weights(one, two)


def _is_close(a: float | None, b: float | None, allowed: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= allowed * max(abs(a), 1e-2)


def _different_weights(one: Path, two: Path) -> list[str]:
    # A run with frozen weights in float8 exports its adapters alone.
    found = [
        [each for kind in ("export", "adapter") for each in root.rglob(f"{kind}/**/*.safetensors")]
        for root in (one, two)
    ]
    files = [sorted(each.relative_to(root) for each in own) for root, own in zip((one, two), found, strict=True)]
    if files[0] != files[1] or not files[0]:
        return [f"exported files {[str(each) for each in files[0]]} and {[str(each) for each in files[1]]}"]
    for file in files[0]:
        first, second = load_file(one / file), load_file(two / file)
        if first.keys() != second.keys():
            return [f"{file}: names differ: {sorted(first.keys() ^ second.keys())}"]
        for name, tensor in first.items():
            error: Any = (tensor - second[name]).norm() / tensor.norm().clamp(min=1e-3)
            if not error <= WEIGHT or not bool(torch.isfinite(tensor).all()):
                return [f"{file}: {name} differs by {error:.1e}"]
    return []
