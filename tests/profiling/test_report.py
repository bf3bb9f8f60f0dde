"""The report's HTML stands alone and has the figures of the JSON; comparisons; the command's refusals."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from nxd_memopt.commands import profile as profile_command
from nxd_memopt.profiling.memory_summary import CATEGORIES
from nxd_memopt.profiling.operations import MODULE
from nxd_memopt.profiling.report import write_comparison, write_report
from nxd_memopt.profiling.time_summary import PASSES, kernel_class, time_summary
from nxd_memopt.training.runtime.distributed import PROFILE_VARIABLE
from tests.profiling.test_step_profiler import FULL, Run
from tests.reference import assert_says, error_message
from tests.reference_models import llama_config
from tests.training.runs import environment, train, write_config


class Page(HTMLParser):
    """Tables of a page by heading: rows of (text, exact value); and everything that it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.references: list[str] = []
        self.tags: list[str] = []
        self._heading = ""
        self._value: float | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self._heading = "" if tag == "h2" else self._heading
        if tag == "table":
            self.tables[self._heading] = []
        if tag == "tr":
            self.tables[self._heading].append([])
        if tag == "td":
            self._value = float(named["data-value"]) if "data-value" in named else None
            self.tables[self._heading][-1].append(("", self._value))

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self._heading += data
        if self.tags and self.tags[-1] == "td" and self.tables[self._heading][-1]:
            text, value = self.tables[self._heading][-1][-1]
            self.tables[self._heading][-1][-1] = (text + data.rstrip("\n"), value)

    def values(self, start: str) -> dict[str, list[float]]:
        """The numbers of the rows of the table whose heading starts with ``start``."""
        (rows,) = (rows for heading, rows in self.tables.items() if heading.startswith(start))
        return {row[0][0]: [value for _, value in row if value is not None] for row in rows if row}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    directories = []
    for options in ({}, FULL):
        directories.append(tmp_path_factory.mktemp("profile"))
        Run(llama_config, **options).profile(directories[-1], skip=1, steps=1)
        write_report(directories[-1])
    return directories


def test_the_page_stands_alone_and_has_the_figures_of_the_json(profiles):
    for directory in profiles:
        profile = json.loads((directory / "rank0.json").read_text())
        text = (directory / "report.html").read_text()
        page = Page(text)
        assert page.references and all(each.startswith("data:image/png;base64,") for each in page.references)
        assert "http" not in text and not {"script", "link", "iframe", "object"} & set(page.tags)
        memory, time = profile["memory"], profile["time"]
        step_s = sum(profile["step_s"]) / len(profile["step_s"])
        categories = page.values("Memory at the peak")
        assert {name: values[0] for name, values in categories.items()} == {
            **memory["at_peak"],
            "sum": sum(memory["at_peak"].values()),
        }
        assert set(categories) == {*CATEGORIES, "sum"}
        layers = page.values("Activations at the peak")
        assert {name: values[0] for name, values in layers.items()} == memory["activations_by_layer"]
        classes = page.values("Time by class")
        assert {name: tuple(values) for name, values in classes.items()} == {
            name: (seconds, seconds / step_s) for name, seconds in time["classes"].items()
        }
        modules = page.values("Time by module")
        expected = [
            sum(times[stage] for name, times in time["modules"].items() if name.endswith("mlp.down_proj"))
            for stage in PASSES
        ]
        assert modules["model.layers.*.mlp.down_proj"] == pytest.approx([*expected, sum(expected)])
        assert page.values("Ranks") == {"0": [step_s, memory["peak_bytes"]]}
        (largest,) = (rows for heading, rows in page.tables.items() if heading.startswith("Largest"))
        found = [(row[0][1], row[1][0], row[2][0], row[4][0].split(" < ")) for row in largest if row]
        assert found == [
            (each["bytes"], each["category"], each["module"], each["stack"] or [""]) for each in memory["largest"]
        ]
        # The text of a cell is its value, rounded.
        (rows,) = (rows for heading, rows in page.tables.items() if heading.startswith("Memory at the peak"))
        assert all(row[1][0] == f"{row[1][1] / 2**20:,.2f} MiB" for row in rows if row)


def test_differences_are_those_of_the_figures(profiles, tmp_path):
    one, other = (json.loads((each / "rank0.json").read_text()) for each in profiles)
    lines = write_comparison(*profiles, tmp_path / "compared.html")
    page = Page((tmp_path / "compared.html").read_text())
    categories = page.values("Memory at the peak")
    for name in CATEGORIES:
        first, second = one["memory"]["at_peak"][name], other["memory"]["at_peak"][name]
        assert categories[name][:3] == [first, second, second - first]
        assert categories[name][3:] == ([] if first == 0 else [second / first - 1])
    assert other["memory"]["at_peak"]["activations"] < one["memory"]["at_peak"]["activations"]
    times = page.values("Time by class")["matmul"]
    assert times[2] == pytest.approx(other["time"]["classes"]["matmul"] - one["time"]["classes"]["matmul"])
    assert any(line.strip().startswith("activations") and "-" in line for line in lines)


def test_kernels_of_a_device_belong_to_the_modules_that_launched_them():
    """The events that a GPU's profile has: operators on the host, kernels that name their operator."""

    def event(name, start, end, children=(), sequence=-1, correlation=0):
        return SimpleNamespace(
            name=name,
            tag=SimpleNamespace(name="TorchOp"),
            start_time_ns=start,
            duration_time_ns=end - start,
            start_tid=1 if start < 100 else 2,
            children=children,
            correlation_id=correlation,
            extra_fields=SimpleNamespace(sequence_number=sequence),
        )

    def kineto(name, start, end, correlation, forward_thread=0, device=DeviceType.CUDA):
        return SimpleNamespace(
            name=lambda: name,
            start_ns=lambda: start,
            duration_ns=lambda: end - start,
            device_type=lambda: device,
            linked_correlation_id=lambda: correlation,
            correlation_id=lambda: correlation,
            fwd_thread_id=lambda: forward_thread,
        )

    forward = event(MODULE + "layers.0.mlp", 0, 50, (event("aten::mm", 10, 20, (), 7, 11),))
    inner = event("aten::mm", 110, 120, (), -1, 12)
    node = event("autograd::engine::evaluate_function: MmBackward0", 100, 150, (inner,), 7, 13)
    kernels = [
        kineto("nvjet_gemm", 1_000, 4_000, 11),
        kineto("nvjet_gemm", 5_000, 7_000, 12),
        kineto("ncclDevKernel_AllGather", 6_000, 9_000, 0),
        kineto("evaluate", 0, 0, 13, forward_thread=1, device=DeviceType.CPU),
    ]
    results = SimpleNamespace(experimental_event_tree=lambda: [forward, node], events=lambda: kernels)
    time = time_summary(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results)), 1, "cuda")
    assert time["classes"] == pytest.approx({"matmul": 5e-6, "communication": 3e-6})
    assert time["modules"]["layers.0.mlp"] == pytest.approx(
        {"forward": 3e-6, "backward": 2e-6, "recompute": 0, "other": 0}
    )
    assert time["communication"]["exposed_communication"] == pytest.approx(2e-6)


def test_classes_of_kernels():
    names = {
        "aten::addmm": "matmul",
        "sm90_xmma_gemm_bf16": "matmul",
        "ncclDevKernel_AllGather_RING": "communication",
        "c10d::_allgather_base_": "communication",
        "aten::_scaled_dot_product_flash_attention": "attention",
        "aten::copy_": "copy",
        "aten::_log_softmax": "softmax and cross entropy",
        "aten::_fused_adamw_": "optimizer",
        "aten::mul": "elementwise and other",
    }
    assert {name: kernel_class(name) for name in names} == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ("nothing to profile", "--config")),
        ("--", ("no COMMAND",)),
        ("--config a.yaml -- true", ("a run's options and -- COMMAND", "pass one")),
        ("--config a.yaml --trainer.output-dir b", ("--trainer.output-dir", "leave it out")),
        ("--report here -- true", ("--report and -- COMMAND", "pass one")),
        ("--report here", ("here", "rank0.json")),
        ("-- no-such-program", ("no-such-program", "cannot be run")),
        ("-- true", ("profiled no step", "7 steps")),
    ],
)
def test_refusals(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_says(error_message(lambda: profile_command.main(arguments.split())), *words)


def test_an_existing_directory_and_another_version_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile").mkdir()
    assert_says(error_message(lambda: profile_command.main(["--", "true"])), "--output profile", "exists already")
    (tmp_path / "profile" / "rank0.json").write_text('{"format": 0}')
    assert_says(error_message(lambda: profile_command.main(["--report", "profile"])), "format 0", "profile again")


def test_the_status_of_a_failed_command_is_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert profile_command.main(["--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert "status 7" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_two_ranks(tmp_path, monkeypatch, capsys):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel_enabled": True}
    config = write_config(tmp_path, parallel=parallel)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "profile"
    assert profile_command.main(["--output", str(output), "--config", str(config), "--nproc", "2"]) == 0
    assert "exposed communication" in capsys.readouterr().out
    ranks = [json.loads((output / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["rank"] for each in ranks] == [0, 1] and ranks[0]["world_size"] == 2
    assert ranks[0]["time"]["communication"]["exposed_communication"] > 0
    # The run has stopped after the profile, and has neither checkpoints nor an export.
    assert len((output / "run" / "metrics.jsonl").read_text().splitlines()) <= 7
    assert not (output / "run" / "export").exists()
    assert not (tmp_path / "run").exists()
    for rank in (0, 1):
        assert (output / f"rank{rank}.trace.json.gz").is_file() and (output / f"rank{rank}.memory.json.gz").is_file()


@pytest.mark.slow
def test_a_profiled_run_has_the_losses_of_any_other_and_says_when_it_is_too_short(tmp_path):
    config = write_config(tmp_path, trainer={"max_steps": 7})
    assert train(config).returncode == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    request = json.dumps({"directory": str(tmp_path / "profile"), "skip": 2, "steps": 3})
    other = ("--trainer.output-dir", str(tmp_path / "other"))
    assert train(config, *other, env={PROFILE_VARIABLE: request}).returncode == 0
    profiled = [json.loads(line)["loss"] for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert profiled == losses and Path(tmp_path / "profile" / "rank0.json").is_file()
    other = ("--trainer.output-dir", str(tmp_path / "third"))
    short = train(config, *other, "--trainer.max-steps", "5", env={PROFILE_VARIABLE: request})
    assert short.returncode == 0 and "not profiled: trainer.max_steps 5 leaves 5" in short.stdout
    own = json.dumps({"directory": str(tmp_path / "own"), "stop": True})
    other = ("--trainer.output-dir", str(tmp_path / "fourth"))
    refused = train(config, *other, "--trainer.max-steps", "5", env={PROFILE_VARIABLE: own})
    assert refused.returncode == 2 and "the profile needs 7" in refused.stderr
