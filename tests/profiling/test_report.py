"""The report's HTML stands alone and has the figures of the JSON; comparisons; the command's refusals."""

from __future__ import annotations

import json
import re
import sys
from html import escape
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from nxd_memopt.commands import profile as profile_command
from nxd_memopt.pipeline.runner import WAITING
from nxd_memopt.profiling.memory_summary import in_layer_order
from nxd_memopt.profiling.operations import MODULE
from nxd_memopt.profiling.report import write_comparison, write_report
from nxd_memopt.profiling.tables import Quantity, Table, comparison, headline, read_profile, tables
from nxd_memopt.profiling.time_summary import PASSES, kernel_class, time_summary
from nxd_memopt.training import loop, profiled
from nxd_memopt.training.parallelize import parallelize
from nxd_memopt.training.runtime.distributed import PROFILE_VARIABLE
from tests.profiling.test_step_profiler import FULL, Run
from tests.reference import assert_says, error_message
from tests.reference_models import llama_config
from tests.training.runs import environment, rows, run_here, summary, write_config


def values_of(found: list[Table], start: str) -> dict[str, list[float]]:
    """The numbers of each row of the table whose title starts with ``start``."""
    (table,) = (table for table in found if table.title.startswith(start))
    return {row[0]: [cell.value for cell in row[1:] if isinstance(cell, Quantity)] for row in table.rows}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    directories = []
    for options in ({}, FULL):
        directories.append(tmp_path_factory.mktemp("profile"))
        Run(llama_config, **options).profile(directories[-1], skip=1, steps=1)
        write_report(directories[-1])
    return directories


def test_the_tables_have_the_figures_of_the_json(profiles):
    for directory in profiles:
        ranks = read_profile(directory)
        found = tables(ranks)
        memory, time = ranks[0]["memory"], ranks[0]["time"]
        step_s = sum(ranks[0]["step_s"]) / len(ranks[0]["step_s"])
        sums = {**memory["at_peak"], "sum": sum(memory["at_peak"].values())}
        assert {name: values[0] for name, values in values_of(found, "Memory at the peak").items()} == sums
        layers = values_of(found, "Kept by forward")
        kept = memory["kept_by_layer"]
        assert {name: values[0] for name, values in layers.items()} == kept | {"sum": sum(kept.values())}
        expected = {name: [seconds, seconds / step_s] for name, seconds in time["classes"].items()}
        assert values_of(found, "Time by class") == expected
        stages = [
            sum(times[stage] for name, times in time["modules"].items() if name.endswith("mlp.down_proj"))
            for stage in PASSES
        ]
        modules = values_of(found, "Time by module")
        assert modules["model.layers.*.mlp.down_proj"] == pytest.approx([*stages, sum(stages), sum(stages) / step_s])
        # With what no operator accounts for, the rows are the step.
        assert sum(values[-1] for values in modules.values()) == pytest.approx(1)
        assert values_of(found, "Ranks") == {"0": [step_s, memory["peak_bytes"]]}


def test_the_page_stands_alone_and_has_every_cell(profiles):
    directory = profiles[0]
    text = (directory / "report.html").read_text()
    assert "http" not in text and text.count("data:image/png;base64,") == 1
    assert not re.search(r"<(script|link|iframe|object)|(src|href)=\"(?!data:)", text)
    for table in tables(read_profile(directory)):
        for row in table.rows:
            for cell in row:
                shown = f">{escape(str(cell))}</td>"
                if isinstance(cell, Quantity):
                    shown = f'<td data-value="{cell.value!r}"{shown}'
                assert shown in text


def test_differences_are_those_of_the_figures(profiles, tmp_path):
    one, other = (read_profile(each)[0] for each in profiles)
    lines = write_comparison(*profiles, tmp_path / "compared.html")
    assert (tmp_path / "compared.html").is_file()
    found = comparison(one, other)
    for name, values in values_of(found, "Memory at the peak").items():
        if name != "sum":
            first, second = one["memory"]["at_peak"][name], other["memory"]["at_peak"][name]
            assert values == [first, second, second - first, *([second / first - 1] if first else [])]
    assert other["memory"]["at_peak"]["activations"] < one["memory"]["at_peak"]["activations"]
    times = values_of(found, "Time by class")["matmul"]
    assert times[2] == pytest.approx(other["time"]["classes"]["matmul"] - one["time"]["classes"]["matmul"])
    assert any(line.strip().startswith("activations") and "-" in line for line in lines)


def test_layers_are_in_the_order_of_their_numbers():
    layers = [f"model.layers.{number}" for number in (0, 1, 10, 11, 2)]
    ordered = in_layer_order(["model.embed", *layers, "model.norm", "lm_head"])
    numbers = [name.rpartition(".")[2] for name in ordered]
    assert numbers == ["embed", "0", "1", "2", "10", "11", "norm", "lm_head"]


def test_a_comparison_names_the_options_that_differ(profiles):
    one, other = (read_profile(each)[0] for each in profiles)
    one = one | {"options": {"data.seq_length": 24, "trainer.compile": "layer"}, "versions": {"torch": "2.11"}}
    other = other | {"options": {"data.seq_length": 48}, "versions": {"torch": "2.11"}}
    (table,) = (each for each in comparison(one, other) if "differ" in each.title)
    assert list(table.rows) == [("data.seq_length", "24", "48"), ("trainer.compile", "layer", "default")]
    assert not any("differ" in each.title for each in comparison(one, one))


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
        # Of 5 microseconds of messages 1 is next to a matmul and 1 in both kernels; the all-to-all is of experts.
        kineto("ncclDevKernel_SendRecv", 3_000, 5_000, 21),
        kineto("ncclDevKernel_SendRecv", 4_000, 5_000, 0),
        kineto("ncclDevKernel_SendRecv", 9_000, 11_000, 12),
        kineto("evaluate", 0, 0, 13, forward_thread=1, device=DeviceType.CPU),
    ]
    messages = event(WAITING, 60, 80, (event("record_param_comms", 65, 75, (), -1, 21),))
    results = SimpleNamespace(experimental_event_tree=lambda: [forward, messages, node], events=lambda: kernels)
    time = time_summary(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results)), 1, "cuda")
    assert time["classes"] == pytest.approx({"matmul": 5e-6, "communication": 8e-6})
    assert time["modules"]["layers.0.mlp"] == pytest.approx(
        {"forward": 3e-6, "backward": 4e-6, "recompute": 0, "other": 0}
    )
    assert time["modules"]["messages between stages"]["other"] == pytest.approx(2e-6)
    assert time["communication"]["exposed_communication"] == pytest.approx(5e-6)
    assert time["waiting_for_stages_s"] == pytest.approx(1e-6)


def test_classes_of_kernels():
    names = {
        "aten::addmm": "matmul",
        "sm90_xmma_gemm_bf16": "matmul",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "matmul",
        "nvjet_qqtst_128x256_128x6_2x1_v_bz_coopB_bias_TNT": "float8 matmul",
        "aten::_scaled_mm": "float8 matmul",
        "cast": "float8 casts",
        "aten::transpose": "elementwise and other",
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


def test_a_profiled_run_leaves_its_cuda_graph_and_times_it_afterwards(tmp_path, monkeypatch):
    """The losses are those of any other run; a counted function stands for the graph, which a CPU does not have."""
    data = {"isolate_documents": False, "seq_length": 64}
    config = write_config(tmp_path, trainer={"max_steps": 9, "save_interval": 0}, data=data)
    assert run_here(config).returncode == 0
    losses = [row["loss"] for row in rows(tmp_path / "run")]

    graph_steps = []

    def graphed(model, config):
        optimizer, eager = parallelize(model, config)

        def replay(micro_batch):
            graph_steps.append(micro_batch)
            return eager(micro_batch)

        return optimizer, replay

    monkeypatch.setattr(loop, "parallelize", graphed)
    monkeypatch.setattr(profiled, "uses_cuda_graph", lambda *_: True)
    monkeypatch.setenv(PROFILE_VARIABLE, json.dumps({"directory": str(tmp_path / "profile"), "skip": 1, "steps": 1}))
    assert run_here(config, "--trainer.output-dir", str(tmp_path / "other")).returncode == 0
    assert [row["loss"] for row in rows(tmp_path / "other")] == losses
    # 9 steps of 2 micro-batches; 1 step is skipped, 1 timed and 1 is for memory.
    assert len(graph_steps) == 2 * (9 - 3)
    profile = json.loads((tmp_path / "profile" / "rank0.json").read_text())
    assert len(profile["graph"]["step_s"]) == 1 and profile["graph"]["peak_bytes"] > 0
    assert any("without the CUDA graph, and" in line for line in headline(profile))
    assert profile["options"]["model.config_overrides.hidden_size"] == 24
    assert profile["options"]["trainer.max_steps"] == 9 and "trainer.compile" not in profile["options"]
    kept = values_of(tables([profile]), "Kept by forward")
    for name in ("model.layers.0", "model.layers.1", "sum"):
        measured, planned, excess = kept[name]
        assert abs(excess) < 0.02, (name, measured, planned)
    # Its phases are the ones of the summary, which has no profile.
    found = summary(tmp_path / "other")
    assert found["start_s"] == profile["start_s"] and list(found["start_s"])[-1] == "first step"
    assert found["time_to_first_step_s"] == pytest.approx(sum(found["start_s"].values()))


def test_a_profile_needs_steps_that_the_run_has(tmp_path, monkeypatch):
    request = {"directory": str(tmp_path / "own"), "stop": True}
    monkeypatch.setenv(PROFILE_VARIABLE, json.dumps(request))
    refused = run_here(write_config(tmp_path, trainer={"max_steps": 5}))
    assert refused.returncode == 2 and "the profile needs 7" in refused.stderr
