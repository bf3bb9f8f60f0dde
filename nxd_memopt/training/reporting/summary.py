"""The end of a run: the Hugging Face export, and the summary as a table and as a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rich.table import Table
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import save_pretrained
from nxd_memopt.checkpoint.files import read_json
from nxd_memopt.checkpoint.huggingface.exporting import write_config
from nxd_memopt.files import write_text
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import raise_together, share_texts
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.tokenize.vocabulary import Vocabulary
from nxd_memopt.training.reporting.step_metrics import gib
from nxd_memopt.training.runtime.start_phases import FIRST_STEP

EVALUATED = (
    "held_out_loss_after",
    "transformers_held_out_loss",
    "best_checkpoint",
    "best_held_out_loss",
    "export",
)
"""Figures that a start without a step has too."""


@dataclass
class Summary:
    """Results of a run, written to summary.json.

    A figure is None if it was not requested, or was measured before a resume and not recorded. ``start_s`` has the
    seconds of the phases of the start.
    """

    backend: str
    tensor_model_parallel_size: int
    data_parallel_size: int
    steps: int = 0
    pipeline_model_parallel_size: int = 1
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: list[int | None] = field(default_factory=list)
    planned_memory_bytes: int | None = None
    available_memory_bytes: int | None = None
    measured_memory_bytes: int | None = None
    freed_memory_bytes: int | None = None
    best_checkpoint: str | None = None
    best_held_out_loss: float | None = None
    start_s: dict[str, float] = field(default_factory=dict)
    export: str | None = None
    transformers_held_out_loss: float | None = None

    def change_percent(self) -> float | None:
        """Return the relative change of the held-out loss in percent, or None if it is unknown or has no base."""
        if not self.held_out_loss_before or self.held_out_loss_after is None:
            return None
        return 100 * (self.held_out_loss_after / self.held_out_loss_before - 1)

    def time_to_first_step_s(self) -> float | None:
        """Return the seconds from the start to the end of the first step, or None if no step was trained."""
        if FIRST_STEP not in self.start_s:
            return None
        return sum(self.start_s.values())

    def transformers_difference(self) -> float | None:
        """Return |our held-out loss - transformers' held-out loss|, or None if it is unknown."""
        if self.transformers_held_out_loss is None or self.held_out_loss_after is None:
            return None
        return abs(self.transformers_held_out_loss - self.held_out_loss_after)

    def write(self, directory: Path) -> None:
        """Write summary.json with the figures and those derived from them."""
        derived = {
            "held_out_change_percent": self.change_percent(),
            "transformers_difference": self.transformers_difference(),
            "time_to_first_step_s": self.time_to_first_step_s(),
        }
        text = json.dumps(asdict(self) | derived, indent=2) + "\n"
        path = directory / "summary.json"
        # A finished run that is started again has nothing new to say.
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)

    def with_recorded(self, directory: Path) -> Summary:
        """Return this summary of a start that has trained nothing, with the figures of the start that has trained.

        Held-out losses are of this start, where it has evaluated. A file of another step says nothing about this one.
        """
        path = directory / "summary.json"
        if not path.is_file():
            return self
        recorded = read_json(path)
        if recorded.get("steps") != self.steps:
            return self
        own = asdict(self)
        # The loss before is read from the records, and is None if it is of other tokens than the loss after.
        del own["held_out_loss_before"]
        evaluated = [name for name in EVALUATED if own[name] is not None]
        return replace(self, **{name: recorded[name] for name in own if name in recorded and name not in evaluated})

    def table(self) -> Table:
        """Return a table of the figures that are not None, for the console."""
        table = Table(title=f"{self.steps} steps on {self.backend}", show_header=False)
        # Without a terminal a table has 80 columns: a longer path is broken, not cut off.
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _planned(self) -> str | None:
        """Return the planned memory of rank 0 next to what its run has used."""
        if self.planned_memory_bytes is None:
            return None
        planned, measured = self.planned_memory_bytes, self.measured_memory_bytes
        if measured is None:
            return gib(planned)
        if self.backend != "cpu":
            return f"{gib(planned)}; measured: {gib(measured)} ({100 * (planned / measured - 1):+.1f} %)"
        # A CPU has no statistics of tensors. The process also grows by what malloc keeps and by libraries, or
        # not at all if a small step fits into memory that was freed before: no error of the plan.
        text = f"{gib(planned)} of tensors; the process grew by {gib(measured)}"
        if self.freed_memory_bytes:
            text += f"\n{gib(self.freed_memory_bytes)} of freed blocks kept by malloc after the last step"
        return text

    def _best(self) -> str | None:
        if self.best_checkpoint is None:
            return None
        return f"{Path(self.best_checkpoint).name}, held-out loss {self.best_held_out_loss:.4f}"

    def _rows(self) -> list[tuple[str, str]]:
        # Rows without a value are left out: not every run exports, evaluates or reports memory. An
        # empty text counts as no value, so a run without peaks has no row for them.
        ranks = [f"rank {rank}: {gib(peak)}" for rank, peak in enumerate(self.peak_memory_bytes)]
        stages = self.pipeline_model_parallel_size
        candidates = [
            (
                "tensor-parallel x data-parallel",
                f"{self.tensor_model_parallel_size} x {self.data_parallel_size}",
            ),
            ("pipeline-parallel", str(stages) if stages > 1 else None),
            ("held-out loss before", _number(self.held_out_loss_before, ".4f")),
            ("held-out loss after", _number(self.held_out_loss_after, ".4f")),
            ("change", _number(self.change_percent(), "+.2f", " %")),
            ("best checkpoint", self._best()),
            ("time to first step", _number(self.time_to_first_step_s(), ".1f", " s")),
            ("mean tokens/s", _number(self.tokens_per_s, ",.1f")),
            ("peak memory", "\n".join(ranks)),
            ("planned memory", self._planned()),
            ("export", self.export),
            ("held-out loss by transformers", _number(self.transformers_held_out_loss, ".4f")),
            ("|difference|", _number(self.transformers_difference(), ".2e")),
        ]
        return [(name, value) for name, value in candidates if value]


def require_verified(summary: Summary, config: TrainConfig) -> None:
    """Raise ``ValueError`` if transformers computes another held-out loss than the model that was trained.

    fp32 losses differ by sums in another order, 1e-5 at most in the tests; 16-bit dtypes have 8 to 11 bits. Tokens
    that experts drop are dropped here alone.
    """
    difference = summary.transformers_difference()
    if difference is None or config.moe.moe_expert_capacity_factor is not None:
        return
    assert summary.transformers_held_out_loss is not None and summary.held_out_loss_after is not None
    is_fp32 = config.dtype == "float32" and not config.trainer.allow_tf32
    bound = (1e-4 if is_fp32 else 2e-2) * max(1.0, summary.held_out_loss_after)
    # Not "greater": a loss may be NaN.
    if not difference <= bound:
        raise ValueError(
            f"trainer.export verify: transformers' held-out loss of {summary.export} is "
            f"{summary.transformers_held_out_loss:.6f}, and {summary.held_out_loss_after:.6f} here, more than "
            f"{bound:.1e} apart: transformers computes something else with these weights; everything is saved, and "
            "training can continue, but do not use the export"
        )


def start_summary() -> Summary:
    """Return the summary with everything that is known before training."""
    return Summary(
        backend=backend.name,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_size(),
        data_parallel_size=parallel_state.get_data_parallel_size(),
    )


def _number(value: float | None, spec: str, unit: str = "") -> str | None:
    if value is None:
        return None
    return f"{value:{spec}}{unit}"


def peak_bytes_of_all_ranks() -> list[int | None]:
    """Return each rank's peak memory in bytes, None if not reported. Every rank calls."""
    # As JSON text through the c10d store, because a rank may have None instead of a number.
    peaks = share_texts(json.dumps(backend.max_memory_allocated()))
    return [json.loads(peak) for peak in peaks]


@contextmanager
def model_files(model: nn.Module, vocabulary: Vocabulary) -> Iterator[Path]:
    """Yield a directory with what an export has next to its weights: configuration and tokenizer. Every rank calls.

    Rank 0 alone fills it, and removes it afterwards.
    """
    assert vocabulary.special is not None
    with tempfile.TemporaryDirectory(prefix="nxd_memopt_model_") as directory:
        with raise_together("writing the tokenizer"):
            if parallel_state.is_global_rank_zero():
                vocabulary.special.write_companions(vocabulary.tokenizer, Path(directory))
                with _config_of_export(model, vocabulary):
                    write_config(model, Path(directory))
        yield Path(directory)


def export(
    model: nn.Module, vocabulary: Vocabulary, directory: Path, files: Path, *, merges_adapters: bool = True
) -> None:
    """Write the model, with its adapters merged or left out, and ``model_files`` as a Hugging Face directory.

    The weights, the tokenizer and the generation config appear with one rename. Every rank calls.
    """
    with _config_of_export(model, vocabulary):
        save_pretrained(model, directory, companions=files, merges_adapters=merges_adapters)


@contextmanager
def _config_of_export(model: nn.Module, vocabulary: Vocabulary) -> Iterator[None]:
    """Give ``model`` the token ids of its export inside the block."""
    assert vocabulary.special is not None
    exported = cast(Any, model)
    own, exported.config = exported.config, vocabulary.special.config_of_export(exported.config)
    try:
        yield
    finally:
        exported.config = own
