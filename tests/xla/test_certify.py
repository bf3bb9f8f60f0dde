"""Certificates of steps that XLA compiled for a simulated NeuronCore; with the barrier removed they must fail."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from nxd_memopt.certify import assert_recompute_survives
from nxd_memopt.certify.command import _worker_environment, run_worker
from nxd_memopt.certify.measure.measurement import is_square_in
from nxd_memopt.certify.report.judge import judge
from nxd_memopt.certify.request import Answer
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.sizes.states import StateLayout
from tests.certify.test_experts import BLOCKS, EXPERT_PARALLEL, MIXTRAL, PADDED, SENT, SHARED
from tests.certify.test_experts import asked as experts_request
from tests.certify_steps import CORE_ATTN, FULL, GPT_NEOX, LLAMA, MAX_RATIO, parallel, request
from tests.reference import assert_says, error_message

WITHOUT_BARRIER = """
from nxd_memopt.backends import backend
from nxd_memopt.certify import worker
backend.optimization_barrier = list
worker.main()
"""


def checks(asked, answer, **options):
    certified = judge(
        asked,
        answer,
        device=device_named("trn1"),
        states=StateLayout(getattr(torch, asked.dtype).itemsize),
        stands_for=asked.dtype,
        **{"compiler_flags": "-O1", "max_temp_ratio": None, **options},
    )
    return {check.name: check for check in certified.checks}


@pytest.mark.parametrize(
    "memory", [pytest.param(FULL, id="full", marks=pytest.mark.slow), pytest.param(CORE_ATTN, id="selective")]
)
@pytest.mark.parametrize(
    "config",
    [pytest.param(LLAMA, id="llama"), pytest.param(GPT_NEOX, id="gpt_neox", marks=pytest.mark.slow)],
)
def test_recompute_survives(config, memory):
    """In 16 bits, as training runs, and F = 4H, GPT-NeoX's own.

    The ratio depends on the shape: what one layer needs at its peak, four S x S tensors, against what four layers keep.
    GPT-NeoX has 0.403 here, temporary tensors in the memory of gradients included.
    """
    asked = request("xla", config, memory, dtype="float16", overrides={"intermediate_size": 1024}, layer_counts=(1, 4))
    by_name = checks(asked, run_worker(asked), max_temp_ratio=MAX_RATIO[memory["recompute_granularity"]])
    assert all(check.passed is not False for check in by_name.values()), by_name
    assert by_name["compiler flags"].passed


def test_without_the_barrier_the_certificate_fails(tmp_path):
    asked = request("xla", LLAMA, FULL, layer_counts=(1,), sequence_length=256)
    question, answer_file = tmp_path / "request.json", tmp_path / "answer.json"
    question.write_text(json.dumps(dataclasses.asdict(asked)), encoding="utf-8")
    command = [sys.executable, "-c", WITHOUT_BARRIER, str(question), str(answer_file)]
    subprocess.run(command, env=_worker_environment(asked, tmp_path / "dump"), check=True, capture_output=True)
    survival = Answer.from_json(json.loads(answer_file.read_text(encoding="utf-8"))).survivals[1]
    assert_says(survival.failure() or "", "does not survive", "adds 8 matmuls", "0 are left")


def test_ranks_share_a_graph_with_the_formulas_collectives():
    """T=4 on 2 KV heads."""
    options = {"parallel": parallel(4, sequence=True), "overrides": {"num_key_value_heads": 2}, "layer_counts": (1, 2)}
    asked = request("xla", LLAMA, FULL, sequence_length=64, **options)
    answer = run_worker(asked)
    by_name = checks(asked, answer)
    assert by_name["same graph on every rank"].passed and len(answer.fingerprints) == 4
    assert by_name["collectives"].passed, by_name["collectives"].detail
    # Of the flags, the compiler's optimization level decides whether recomputation is merged.
    assert checks(asked, answer, compiler_flags="-O2")["compiler flags"].passed is False
    assert checks(asked, answer, compiler_flags=None)["compiler flags"].passed is None


@pytest.mark.slow
def test_equal_graphs_are_both_measured():
    """Without recomputation configured, the step and its baseline are one graph, which XLA would compile once."""
    survival = run_worker(request("xla", LLAMA, {}, layer_counts=(2,), sequence_length=64)).survivals[2]
    assert survival.recompute.matmuls == survival.baseline.matmuls > 0
    assert_says(survival.failure() or "", "recomputes nothing")


def test_users_assertion_says_which_flags_it_needs():
    message = error_message(lambda: assert_recompute_survives(lambda: None), RuntimeError)
    assert_says(message, "XLA_FLAGS", "--xla_dump_to=", "--xla_dump_hlo_as_text", "cse_barrier_expander")


def test_isolated_documents_never_make_sequence_squared():
    memory = {"attention_backend": "auto"}
    asked = request("xla", LLAMA, memory, layer_counts=(1,), isolate_documents=True, sequence_length=1024)
    largest = run_worker(asked).survivals[1].recompute.largest
    assert not [tensor for tensor in largest if is_square_in(tensor, 1024)], largest
    # the scores of one tile of 8 heads, in fp32
    assert max(tensor.nbytes for tensor in largest) == 8 * 512 * 512 * 4, largest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "options"),
    [((*PADDED, SENT), EXPERT_PARALLEL), ((*BLOCKS, SHARED), EXPERT_PARALLEL)],
    ids=["padded, rows sent", "blocks, shared expert with a gate"],
)
def test_experts_are_certified_in_both_static_forms(moe, options, tmp_path):
    asked = experts_request(tmp_path, MIXTRAL, moe, backend="xla", sequence_parallel_enabled=True, **FULL, **options)
    answer = run_worker(asked)
    failed = [check for check in checks(asked, answer).values() if check.passed is False]
    assert not failed, failed
    survival = answer.survivals[3]
    assert survival.extra_matmuls == survival.traced_extra_matmuls > 0
    assert len(set(answer.fingerprints)) == 1 and len(answer.fingerprints) == 4
