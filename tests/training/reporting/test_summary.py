"""The summary of a run whose figures are at their limits: it must not fail after training."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest

from nxd_memopt.training import loop
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.reporting.summary import Summary, export, require_verified
from tests.reference import assert_says
from tests.training.runs import LLAMA, run_here, summary, write_config


def shown(backend="cpu", **figures) -> dict[str, str]:
    """Return the rows of the table by name."""
    table = Summary(backend, 1, 1, None, **figures).table()
    names, values = (list(column.cells) for column in table.columns)
    return {str(name): str(value) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("measured", [0, 2**29, -(2**20)])
def test_the_growth_of_a_process_is_not_compared_with_planned_tensors(measured):
    """A CPU has no figure of tensors alone: malloc keeps freed blocks, and may have had them before."""
    planned = shown(planned_memory_bytes=2**30, measured_memory_bytes=measured, freed_memory_bytes=2**28)[
        "planned memory"
    ]
    assert planned.startswith(f"1.00 GiB of tensors; the process grew by {measured / 2**30:.2f} GiB\n0.25 GiB of freed")
    assert "%" not in planned


def test_stages_of_a_pipeline_have_a_row():
    assert "pipeline-parallel" not in shown()
    assert shown(pipeline_model_parallel_size=2)["pipeline-parallel"] == "2"


def test_an_allocator_measures_what_is_planned():
    figures = {"planned_memory_bytes": 2**30, "measured_memory_bytes": 2**29}
    assert shown("cuda", **figures)["planned memory"] == "1.00 GiB; measured: 0.50 GiB (+100.0 %)"
    assert shown(planned_memory_bytes=2**30)["planned memory"] == "1.00 GiB"


def test_a_change_needs_a_loss_before():
    assert "change" not in shown(held_out_loss_before=0.0, held_out_loss_after=0.5)
    assert shown(held_out_loss_before=2.0, held_out_loss_after=1.0)["change"] == "-50.00 %"


@pytest.mark.parametrize(("eps", "returncode"), [(None, 0), (3.0, 1)])
def test_an_export_of_which_transformers_makes_something_else_fails_the_run(eps, returncode, tmp_path, monkeypatch):
    """At the end: the export, the checkpoint and the summary are there."""

    def changed_export(model, vocabulary, directory, files):
        export(model, vocabulary, directory, files)
        if eps is not None:
            content = json.loads((directory / "config.json").read_text()) | {"rms_norm_eps": eps}
            (directory / "config.json").write_text(json.dumps(content))

    monkeypatch.setattr(loop, "export", changed_export)
    outcome = run_here(write_config(tmp_path, trainer={"export": "verify", "max_steps": 2}))
    assert (outcome.returncode != 0) == (returncode != 0), outcome.stderr
    run = tmp_path / "run"
    assert summary(run)["transformers_held_out_loss"] and list(run.glob("checkpoints/step_*/index.json"))
    if returncode:
        assert_says(outcome.stderr, "trainer.export verify", str(run / "export"), "do not use the export")


@pytest.mark.parametrize(
    ("precision", "theirs", "fails"),
    [
        ("32-true", 4.0005, True),
        ("32-true", math.nan, True),
        ("bf16-mixed", 4.1, True),
    ],
)
def test_the_bound_of_a_verified_export(precision, theirs, fails):
    model = {"tokenizer": "t", "config_overrides": LLAMA}
    config = config_from_mapping({"model": model, "trainer": {"precision": precision}})
    found = Summary("cpu", 1, 1, None, held_out_loss_after=4.0, transformers_held_out_loss=theirs)
    with pytest.raises(ValueError, match=r"trainer\.export verify") if fails else nullcontext():
        require_verified(found, config)
