"""Profiles of CPU steps: the plan's activations, an independent count of the peak, and no trace of it elsewhere."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.certify.measure.eager import _Recorder
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.models import model_class
from nxd_memopt.optimizer import AdamW
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.sizes.rank_sizes import rank_sizes
from nxd_memopt.profiling import ProfileRequest, StepProfiler
from nxd_memopt.profiling.memory_summary import CATEGORIES
from nxd_memopt.profiling.tensors import owned_blocks
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config

ROWS, LENGTH, LAYERS = 4, 24, 3
FULL = {"recompute_granularity": "full"}


class Run:
    """A model with AdamW, and its step."""

    def __init__(self, config, *, clears_first=False, **options):
        self.memory = MemoryConfig(attention_backend="sdpa", **options)
        self.config = config(num_hidden_layers=LAYERS)
        self.model = model_class(self.config.model_type)(self.config, memory=self.memory, dtype=torch.float32)
        apply_memory(self.model, self.memory)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = batch(rows=ROWS, length=LENGTH)
        self.clears_first = clears_first

    def step(self):
        if self.clears_first:
            self.optimizer.zero_grad()
        self.model(**self.inputs).loss.backward()
        self.optimizer.step()
        if not self.clears_first:
            self.optimizer.zero_grad()

    def profile(self, directory, **options):
        profiler = StepProfiler(ProfileRequest(str(directory), **options), self.model, self.optimizer)
        while not profiler.is_done:
            with profiler.step():
                self.step()
        return json.loads((directory / "rank0.json").read_text())


def blocks_of(directory: Path) -> list[dict]:
    return json.loads(gzip.decompress((directory / "rank0.memory.json.gz").read_bytes()))


def counted_peak(run: Run) -> int:
    """Peak of the storages of a step, counted operation by operation, without the profiler."""
    recorder = _Recorder()
    # The recorder does not see that a step frees what an earlier one has made, which is done first.
    freed = ("gradients",) if run.clears_first else ()
    blocks = owned_blocks(run.model, run.optimizer, "cpu").values()
    existing = sum(size for size, category in blocks if category not in freed)
    with recorder:
        run.step()
    current = peak = existing
    for _, change in recorder._events:
        current += change
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("options", [{}, FULL, {**FULL, "recompute_method": "nested"}], ids=str)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_activations_are_the_planned_ones_layer_by_layer(config, options, tmp_path):
    run = Run(config, **options)
    run.profile(tmp_path, skip=1, steps=1)
    sizes = rank_sizes(
        model_spec(run.config), ParallelConfig(1), sequence_length=LENGTH, micro_batch_size=ROWS, dtype="float32"
    )
    plan = activations(sizes, run.memory, Kernels(fused=False, attention="sdpa"))
    found = [each for each in blocks_of(tmp_path) if each["pass"] == "forward" and each["category"] != "temporary"]
    # A checkpoint saves the state of the CPU's random number generator, which no device has.
    random_state = torch.get_rng_state().nbytes
    found = [each for each in found if not (options and each["bytes"] == random_state)]
    # The gradient of the head, which the fused loss computes in forward, ends as a gradient.
    assert sum(each["bytes"] for each in found) == plan.device_bytes
    kept = {"activations", "gradients"}
    assert {each["category"] for each in found} == kept
    recomputed = [each for each in blocks_of(tmp_path) if each["category"] == "recomputed activations"]
    assert bool(recomputed) == bool(options)
    assert all(each["module"].split(".")[-1] != "" and each["pass"] == "recompute" for each in recomputed)


@pytest.mark.parametrize("clears_first", [False, True])
@pytest.mark.parametrize("options", [{}, FULL], ids=str)
def test_the_categories_add_up_to_the_peak_that_is_counted_independently(options, clears_first, tmp_path):
    run = Run(llama_config, clears_first=clears_first, **options)
    memory = run.profile(tmp_path, skip=2, steps=1)["memory"]
    assert (
        memory["peak_bytes"]
        == sum(memory["at_peak"].values())
        == sum(memory["timeline"]["bytes"][name][_peak_index(memory)] for name in CATEGORIES)
    )
    # The count by operations does not see what a kernel allocates for itself.
    assert memory["peak_bytes"] == pytest.approx(counted_peak(run), rel=0.01)
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    assert memory["at_peak"]["weights"] == weights
    # One step count of 4 bytes for each parameter, and two moments.
    assert memory["at_peak"]["optimizer states"] >= 2 * weights
    assert memory["allocator_peak_bytes"] is None and "keeps no total" in memory["source"]
    # Forward keeps activations, and the head's gradient, which the fused loss computes. The timeline's points are
    # thinned out, so that its maximum is a few hundred bytes lower.
    expected = max(memory["timeline"]["bytes"]["activations"]) + run.model.lm_head.weight.nbytes
    assert sum(memory["kept_by_layer"].values()) == pytest.approx(expected, rel=0.01)
    assert len(memory["largest"]) == 10
    sizes = [each["bytes"] for each in memory["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    stacks = [frame for each in memory["largest"] for frame in each["stack"]]
    assert any("test_step_profiler.py" in frame and frame.endswith(": step") for frame in stacks)
    assert not any("torch/nn" in frame for frame in stacks)


def _peak_index(memory):
    totals = [sum(values) for values in zip(*memory["timeline"]["bytes"].values(), strict=True)]
    return totals.index(max(totals))


def test_gradients_are_named_although_the_step_frees_them(tmp_path):
    run = Run(llama_config)
    run.profile(tmp_path, skip=1, steps=1)
    gradients = [each for each in blocks_of(tmp_path) if each["category"] == "gradients"]
    assert sum(each["bytes"] for each in gradients) == sum(parameter.nbytes for parameter in run.model.parameters())
    assert all(each["end_ns"] is not None for each in gradients)


def test_times_by_class_and_by_module_are_the_same_time(tmp_path):
    run = Run(llama_config, **FULL)
    profile = run.profile(tmp_path, skip=1, steps=2)
    time = profile["time"]
    by_class = sum(time["classes"].values())
    by_module = sum(sum(times.values()) for times in time["modules"].values())
    assert by_class == pytest.approx(by_module)
    mean = sum(profile["step_s"]) / 2
    assert 0.5 * mean < by_class <= mean
    assert len(profile["step_s"]) == 2 and profile["steps"] == [2, 3]
    for layer in range(LAYERS):
        times = time["modules"][f"model.layers.{layer}.mlp.down_proj"]
        # Checkpoints stop recomputation before the last projection.
        assert times["forward"] > 0 and times["backward"] > 0
        assert time["modules"][f"model.layers.{layer}.self_attn.core_attn"]["recompute"] > 0
    assert "matmul" in time["classes"] and "attention" in time["classes"]
    # What operators take is computation; the other class is the time between them.
    waiting = time["classes"]["Python, dispatch and waiting"]
    # Some operators record a part of themselves without a namespace, which counts as dispatch: 5 %, and
    # more where another process interrupts just that part.
    assert time["communication"]["compute"] == pytest.approx(by_class - waiting, rel=0.15)
    assert time["communication"]["exposed_communication"] == 0


def test_nothing_is_left_outside_of_profiled_steps(tmp_path):
    run = Run(llama_config)
    call = nn.Module.__call__
    profiler = StepProfiler(ProfileRequest(str(tmp_path), skip=1, steps=1), run.model, run.optimizer)
    outside = []
    for _ in range(5):
        context = profiler.step()
        outside.append(type(context) is contextlib.nullcontext)
        with context:
            run.step()
        hooks = [parameter._post_accumulate_grad_hooks for parameter in run.model.parameters()]
        assert nn.Module.__call__ is call and not any(hooks)
        assert not torch.autograd._profiler_enabled()
    assert outside == [True, False, False, True, True]


def test_a_failed_step_ends_the_profile(tmp_path):
    run = Run(llama_config)
    call = nn.Module.__call__
    for skip in (0, 1):
        profiler = StepProfiler(ProfileRequest(str(tmp_path), skip=0, steps=2), run.model, run.optimizer)
        for _ in range(skip):
            with profiler.step():
                run.step()
        with pytest.raises(ZeroDivisionError), profiler.step():
            raise ZeroDivisionError
        assert nn.Module.__call__ is call and not torch.autograd._profiler_enabled()
    assert not list(tmp_path.glob("rank0.json"))


def test_requests_that_are_refused():
    assert_says(error_message(lambda: ProfileRequest("x", steps=0)), "steps", "at least 1", "0")
    assert_says(error_message(lambda: ProfileRequest("x", skip=-1)), "skip", "at least 0", "-1")
    request = ProfileRequest("x", 5, 6, stop=True)
    assert ProfileRequest.from_json(request.to_json()) == request and request.total_steps == 12
