"""A plan has the attention that the backend of a GPU runs, and names the temporary tensors that it does not count."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from nxd_memopt.architectures.configs import NAMED_CONFIGS, with_defaults
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.cuda import attention as cuda_attention
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.ops import attention
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.memory import backward
from nxd_memopt.planner.memory.backward import layer_moments
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.search.problem import Problem, Setting, attention_notes, kernels_of
from nxd_memopt.planner.techniques.gpu_attention import LIMITS, limit_refusal
from tests.planner.storages import sizes_of
from tests.reference import assert_says, error_message

ROWS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "attention.csv"
MIB = 2**20
ONE_SEQUENCE = Setting()


def problem(device="h200", model="llama-3-8b", length=8192, precision="bf16-true", **options) -> Problem:
    names = ("isolate_documents", "attention")
    given = {name: options.pop(name) for name in names if name in options}
    config = with_defaults({**NAMED_CONFIGS[model], **options})
    return Problem(model_spec(config), device_named(device), 8, length, precision=precision, **given)


@pytest.mark.parametrize("name", LIMITS)
def test_the_backend_and_the_planner_refuse_the_same_calls(name):
    dtypes = ("bfloat16", "float16", "float32", "float64")
    counts = {True: 0, False: 0}
    for dtype, head_dim, masked, packed, dropout_p in product(
        dtypes, (20, 40, 64, 80, 128, 136, 256, 264), (False, True), (False, True), (0.0, 0.1)
    ):
        call = AttentionCall((1, 4, 2048, head_dim), 2, masked, dropout_p, getattr(torch, dtype), packed)
        refused = attention._implementation_refusal(name, call) or cuda_attention.refusal(name, call)
        planned = limit_refusal(name, dtype=dtype, head_dim=head_dim, masked=masked, packed=packed, dropout_p=dropout_p)
        assert (refused is None) == (planned is None), (call, refused, planned)
        counts[planned is None] += 1
    assert counts[True] and (counts[False] or name == "math")


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("h100", {"isolate_documents": True}, "flash4"),
        ("h200", {"head_dim": 80}, "cudnn"),
        ("h200", {"head_dim": 256}, "flash"),
        ("h200", {"attention_dropout": 0.1}, "flash"),
        ("h200", {"attention_dropout": 0.1, "isolate_documents": True}, "math"),
        ("h200", {"precision": "32-true"}, "efficient"),
        ("h200", {"precision": "32-true", "isolate_documents": True}, "tiled"),
        ("a100-80gb", {"precision": "16-mixed"}, "flash"),
        ("b200", {}, "cudnn"),
        ("b200", {"isolate_documents": True}, "flash"),
    ],
)
def test_a_plan_has_the_first_implementation_that_the_gpu_supports(device, options, expected):
    assert kernels_of(problem(device, **options), MemoryConfig()).attention == expected


def test_the_implementation_of_this_process_is_planned():
    asked = problem(attention="cudnn")
    assert kernels_of(asked, MemoryConfig()).attention == "cudnn"
    assert kernels_of(asked, MemoryConfig(attention_backend="flash")).attention == "flash"


def test_windows_with_dropout_are_planned_as_math_only():
    asked = problem(sliding_window=1024, attention_dropout=0.1, model_type="mistral")
    assert_says(error_message(lambda: kernels_of(asked, MemoryConfig())), "attention_dropout 0.1", "'math'")
    assert kernels_of(asked, MemoryConfig(attention_backend="math")).attention == "math"


def test_a_plan_says_what_it_assumes_about_packages():
    notes = attention_notes(problem(), ONE_SEQUENCE)
    assert len(notes) == 1
    assert_says(notes[0], "flash4", "flash-attn-4", "cudnn runs")
    # In the process that will run it nothing is assumed, and a name is no choice.
    assert attention_notes(problem(attention="flash4"), ONE_SEQUENCE) == []
    assert attention_notes(problem(), Setting(memory=MemoryConfig(attention_backend="flash4"))) == []
    assert attention_notes(problem("trn1"), ONE_SEQUENCE) == []

    # Tiles have temporary tensors that are not counted.
    windowed = problem(sliding_window=1024, model_type="mistral")
    assert any("tiles of attention" in note for note in attention_notes(windowed, ONE_SEQUENCE))
    assert attention_notes(problem("b200"), ONE_SEQUENCE) == []


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_gradients_of_kv_heads_are_copied_for_every_query_head(name, monkeypatch):
    """In the backward of attention and at no other moment: 128 MiB of LLaMA-3-8B."""
    llama = sizes_of(problem().model, ParallelConfig(), 8192, 1, "bfloat16")
    planned = layer_moments(llama, MemoryConfig(), Kernels(True, name))
    monkeypatch.setattr(backward, "COPIES_KV_GRADIENTS", ())
    without = layer_moments(llama, MemoryConfig(), Kernels(True, name))
    pairs = zip(planned, without, strict=True)
    more = [sum(one.temporary.values()) - sum(other.temporary.values()) for one, other in pairs]
    assert sorted(more)[-2:] == [0, 128 * MIB]
