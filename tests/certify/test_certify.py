"""Certificates of eager steps: survival, collectives against the formulas, graphs, memory, the command."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

from nxd_memopt import cli
from nxd_memopt.backends import backend
from nxd_memopt.certify import assert_recompute_survives, command, without_recompute, worker
from nxd_memopt.certify.command import read
from nxd_memopt.certify.measure.eager import measure_eager
from nxd_memopt.certify.memory_terms import extrapolate, memory_terms
from nxd_memopt.certify.report.judge import judge
from nxd_memopt.certify.report.verdict import check_ranks
from nxd_memopt.certify.request import Answer, Request
from nxd_memopt.planner.hardware import GIB, device_named
from nxd_memopt.planner.sizes.states import StateLayout
from tests.certify_steps import CORE_ATTN, FULL, GPT_NEOX, LLAMA, MAX_RATIO, parallel, request
from tests.reference import assert_says, error_message
from tests.reference_models import batch, llama_config, parallel_model

CONFIGS = {"llama": LLAMA, "gpt_neox": GPT_NEOX}
SMALL = {"sequence_length": 32, "layer_counts": (2,)}
SHALLOW = {"sequence_length": 32, "layer_counts": (1, 2)}


def certificate(asked: Request, *, answer: Answer | None = None, max_temp_ratio: float | None = None):
    """Of ``answer``, or of a measurement, as it travels between the processes."""
    answer = answer or Answer.from_json(json.loads(json.dumps(worker.measure(asked).to_json())))
    return judge(
        asked,
        answer,
        device=device_named("trn1"),
        states=StateLayout(getattr(torch, asked.dtype).itemsize),
        max_temp_ratio=max_temp_ratio,
        stands_for=asked.dtype,
        compiler_flags=None,
    )


def verdicts(certified) -> dict[str, bool | None]:
    return {check.name: check.passed for check in certified.checks}


# Survival


@pytest.mark.parametrize(
    ("config", "memory"),
    [
        pytest.param("llama", FULL, id="llama-full"),
        pytest.param("gpt_neox", CORE_ATTN, id="gpt_neox-selective"),
        pytest.param("llama", CORE_ATTN, id="llama-selective", marks=pytest.mark.slow),
        pytest.param("gpt_neox", FULL, id="gpt_neox-full", marks=pytest.mark.slow),
    ],
)
def test_recompute_survives_eagerly(config, memory):
    certified = certificate(
        request("cpu", CONFIGS[config], memory), max_temp_ratio=MAX_RATIO[memory["recompute_granularity"]]
    )
    assert verdicts(certified) == {
        "recompute survives": True,
        "same graph on every rank": True,
        "collectives": True,
        "large tensors": None,
        "memory": True,
    }
    survival = certified.survivals[4]
    # of a LLaMA layer's 9 matmuls the last is needed by nobody, of a GPT-NeoX layer's 6 the two of its one reduction
    per_layer = {("llama", "full"): 8, ("gpt_neox", "full"): 4}.get((config, memory["recompute_granularity"]), 1)
    assert survival.extra_matmuls == 4 * per_layer
    assert "S x S alive" in next(check.detail for check in certified.checks if check.name == "large tensors")


def small_step(**options):
    net = parallel_model(llama_config(num_hidden_layers=3), attention_backend="math", **options)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(**batch()).loss.backward()

    return step


def test_users_assertion_returns_the_figures():
    survival = assert_recompute_survives(small_step(**FULL), max_temp_ratio=0.4)
    assert survival.extra_matmuls == 3 * 8 and survival.ratio < 0.4


def test_users_assertion_fails_with_the_figures():
    assert_says(error_message(lambda: assert_recompute_survives(small_step()), AssertionError), "recomputes nothing")
    too_little = error_message(
        lambda: assert_recompute_survives(small_step(**FULL), max_temp_ratio=0.01), AssertionError
    )
    assert_says(too_little, "more than 0.01", "matmuls", "GiB", "ratio")


def test_baseline_puts_checkpoint_back():
    with pytest.raises(RuntimeError, match="boom"), without_recompute():
        assert measure_eager(small_step(**FULL)).matmuls == measure_eager(small_step()).matmuls
        raise RuntimeError("boom")
    assert measure_eager(small_step(**FULL)).matmuls > measure_eager(small_step()).matmuls


def test_fake_tensors_measure_what_real_ones_do():
    config = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
    asked = request("cpu", config, FULL, sequence_length=64)
    fake = worker.measure_variant(asked, 2)
    with worker.pretended_world(asked, rank=0):
        model, inputs = worker.build(asked, 2)
        real = measure_eager(lambda: worker.step(model, inputs))
    assert (fake.matmuls, fake.flops, fake.held_bytes) == (real.matmuls, real.flops, real.held_bytes)


def test_peak_counts_what_is_alive_at_once():
    x = torch.ones(1000, requires_grad=True)  # 4000 bytes, there before the step

    def step() -> None:
        for _ in range(5):
            torch.exp(torch.exp(x.detach()))  # two of 4000 at once, ten in all

    assert measure_eager(step).peak_bytes == 8000
    assert measure_eager(lambda: x.exp().sum().backward()).held_bytes == 4000


def test_the_cost_of_isolated_documents_is_named():
    """tests/xla measures a step with them."""
    asked = request("cpu", LLAMA, {"attention_backend": "auto"})
    answer = worker.measure(asked)
    isolated = dataclasses.replace(asked, isolate_documents=True)
    found = {}
    for each in (asked, isolated, dataclasses.replace(asked, backend="xla")):
        certified = certificate(each, answer=answer)
        found[each.isolate_documents] = {check.name: check.detail for check in certified.checks}
        terms = certified.memory.terms
        assert ("DMA ring spills" in terms) == ("updated parameters" in terms) == (each.backend == "xla")
    assert "isolated documents" not in found[False]
    assert_says(found[True]["isolated documents"], "3 tiles of 512 x 512 scores", "75% of all scores", "flash kernels")


# Collectives


SELECTIVE = {"recompute_granularity": "selective"}
BLOCK = {"recompute_method": "block", "recompute_num_layers": 1}
REGIONS = {**SELECTIVE, "recompute_modules": ["attn", "norm"]}
SLOW_CASES = [
    *((memory, False) for memory in ({}, FULL, REGIONS)),
    ({}, True),
    ({**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}, True),
    ({**FULL, **BLOCK}, True),
    ({**SELECTIVE, **BLOCK, "recompute_modules": ["attn"]}, True),
    ({**SELECTIVE, "recompute_modules": ["mlp", "core_attn"]}, True),
]


@pytest.mark.parametrize(
    ("memory", "sequence"),
    [
        (REGIONS, True),
        pytest.param(FULL, True, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", ["llama", "gpt_neox"])
def test_collectives_equal_the_formulas(config, memory, sequence):
    """T=4 on 2 KV heads: LLaMA's KV gradients are summed over pairs."""
    overrides = {"num_key_value_heads": 2} if config == "llama" else {}
    options = {"parallel": parallel(4, sequence=sequence), "overrides": overrides, **SHALLOW}
    # Measured models have the layers that are recomputed together.
    number = memory.get("recompute_num_layers", 1)
    options["layer_counts"] = (number, 2 * number)
    asked = request("cpu", CONFIGS[config], memory, **options)
    certified = certificate(asked)
    by_name = {check.name: check for check in certified.checks}
    assert by_name["collectives"].passed, by_name["collectives"].detail
    least = 4 if config == "llama" else 3  # GPT-NeoX's branches share a reduction, its norms' gradients need one
    assert certified.survivals[2].recompute.collectives.total() >= least * 2 + 3  # embedding, loss, dX of the head


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"parallel": parallel(4, sequence=True, reduce_dtype="float32"), "dtype": "bfloat16"},
            id="fp32 reductions",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"overrides": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}},
            id="biases",
            marks=pytest.mark.slow,
        ),
        pytest.param({"overrides": {"tie_word_embeddings": True}, "micro_batch_size": 3}, id="tied"),
        pytest.param(
            {"dtype": "float16", "parallel": parallel(4, sequence=False)}, id="loss in backward", marks=pytest.mark.slow
        ),
    ],
)
def test_collectives_of_odd_llamas(changes):
    options = {"parallel": parallel(4, sequence=True), **SHALLOW, **changes}
    certified = certificate(request("cpu", LLAMA, FULL, **options))
    assert verdicts(certified)["collectives"]


def test_dropout_after_the_last_reduction_recomputes_it(recwarn):
    config = {**GPT_NEOX, "hidden_dropout": 0.1}
    asked = request("cpu", config, FULL, parallel=parallel(4, sequence=False), **SHALLOW)
    with pytest.raises(RuntimeError, match="model_parallel_manual_seed"):
        worker.measure(request("cpu", config, FULL, parallel=parallel(4, sequence=True), **SHALLOW))
    assert verdicts(certificate(asked))["collectives"]


def test_an_all_reduce_for_an_all_gather_is_named(monkeypatch):
    def by_all_reduce(tensor, group):
        size = backend.group_size(group)
        return backend.all_reduce_async(tensor.repeat(size, *[1] * (tensor.dim() - 1)), group)

    monkeypatch.setattr(backend, "all_gather_async", by_all_reduce)
    # measure_eager counts what is under the name all_gather_async: let the collective be made in plain sight
    monkeypatch.setattr("nxd_memopt.certify.measure.eager._COLLECTIVES", {"all_reduce_async": "all_reduce"})
    asked = request("cpu", LLAMA, FULL, parallel=parallel(4, sequence=True), **SHALLOW)
    (failed,) = [check for check in certificate(asked).checks if check.name == "collectives"]
    assert failed.passed is False
    assert_says(failed.detail, "missing", "all_gather of 32768 bytes over 4", "all_reduce of 32768 bytes over 4")


# Graphs, memory


def test_a_graph_per_rank_is_refused():
    assert check_ranks(["a", "a", "a"]).passed
    failed = check_ranks(["a", "b", "a", "c"])
    assert failed.passed is False
    assert_says(failed.detail, "3 graphs", "[1, 3]")


def test_ranks_that_run_other_operations_are_seen(monkeypatch):
    step = worker.step

    def uneven(model, ids):
        outputs = step(model, ids)
        return [*outputs, outputs[0].exp()] if torch.distributed.get_rank() == 1 else outputs

    asked = request("cpu", LLAMA, {}, parallel=parallel(2, sequence=True), **SMALL)
    assert len(set(worker.measure(asked).fingerprints)) == 1
    monkeypatch.setattr(worker, "step", uneven)
    fingerprints = worker.measure(asked).fingerprints
    assert fingerprints[0] != fingerprints[1]


def test_memory_terms():
    states = StateLayout(2, master_weights=True, sharding="zero1", data_parallel_size=4)
    sizes = {"temporary_bytes": 7, "input_bytes": 5, "capacity_gib": 2.0, "reserve_gib": 1.0}
    memory = memory_terms(num_parameters=1000, states=states, **sizes)
    assert list(memory.terms.values()) == [2000, 4000, 250 * 8, 250 * 4, 7, 5, GIB]
    assert memory.fits and memory.total_bytes == GIB + 9012
    plain = memory_terms(num_parameters=1000, states=StateLayout(4), **sizes)
    assert list(plain.terms.values())[:4] == [4000, 4000, 8000, 0], "fp32 parameters are their own masters"
    graphs = memory_terms(num_parameters=1000, states=StateLayout(4), **sizes, in_graphs=True)
    assert graphs.terms["updated parameters"] == 0, "fp32 parameters are updated in their memory"
    over = memory_terms(num_parameters=GIB, states=StateLayout(4), **sizes)
    assert not over.fits


@pytest.mark.parametrize(
    ("scratchpad_gib", "total_gib", "fits"),
    [
        (8.88 / 2, 14.14, True),  # S=4096: neuron-monitor's peak of both cores, halved; temporaries in proportion to S
        (8.88, 18.12, False),  # S=8192: neuronx-cc's account, which has 1.02 GiB of spills
    ],
)
def test_published_steps_of_trn1(scratchpad_gib, total_gib, fits):
    """LLaMA-3.1-8B with LoRA at T=2 on a trn1.2xlarge: 4,041,478,144 parameters a rank, of which 26,214,400 train."""
    trained = 26_214_400
    memory = memory_terms(
        num_parameters=trained,
        states=StateLayout(2, master_weights=True),
        temporary_bytes=int(scratchpad_gib * GIB),
        input_bytes=2 * (4_041_478_144 - trained),  # frozen weights are inputs that nothing updates
        capacity_gib=16.0,
        in_graphs=True,
    )
    assert memory.fits is fits
    # neuronx-cc's account has no moments and masters (0.3 GiB), and 0.5 GiB of what is reserved here
    assert memory.total_bytes / GIB == pytest.approx(total_gib, rel=0.06)
    if not fits:
        assert memory.terms["DMA ring spills"] / GIB == pytest.approx(1.02, abs=0.005)
    assert memory.terms["updated parameters"] == memory.terms["parameters"] == 2 * trained


def test_extrapolation_is_no_flatter_than_what_a_layer_keeps():
    assert extrapolate({2: 100, 4: 140}, 10, least_per_layer=3) == 140 + 6 * 20
    assert extrapolate({2: 100, 4: 101}, 10, least_per_layer=3) == 101 + 6 * 3


@pytest.mark.parametrize("memory", [pytest.param({}, id="none", marks=pytest.mark.slow), pytest.param(FULL, id="full")])
def test_extrapolation_meets_what_a_deeper_model_holds(memory):
    asked = request("cpu", LLAMA, memory, layer_counts=(2, 4), sequence_length=256)
    measured = {n: worker.measure_variant(asked, n).held_bytes for n in (2, 4, 7)}
    assert extrapolate({n: measured[n] for n in (2, 4)}, 7, least_per_layer=0) == measured[7]


# The command


ARGUMENTS = (
    "--model llama-3-8b --backend cpu --seq-length 64 --measure-layers 2 3 --trainer.precision bf16-true "
    "--model.config-overrides.hidden_size=64 --model.config-overrides.intermediate_size=96 "
    "--model.config-overrides.num_attention_heads=4 --model.config-overrides.num_key_value_heads=2 "
    "--model.config-overrides.vocab_size=61 --model.config-overrides.num_hidden_layers=6 "
)


def certify(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["nxd-memopt", "certify", *ARGUMENTS.split(), *map(str, arguments)])
    return cli.main()


def test_command_certifies(monkeypatch, capsys, tmp_path):
    file = tmp_path / "certificate.json"
    options = ["--parallel.tensor-model-parallel-size", 2, "--parallel.sequence-parallel-enabled"]
    options += ["--memory.recompute-granularity", "full"]
    answers = []

    def measured_here(asked: Request) -> Answer:  # tests/xla measures in the worker's process
        answers.append(Answer.from_json(json.loads(json.dumps(worker.measure(asked).to_json()))))
        return answers[0]

    monkeypatch.setattr(command, "run_worker", measured_here)
    assert certify(monkeypatch, *options, "--json", file) == 0
    assert "certified" in capsys.readouterr().out
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["passed"] and written["request"]["config"]["num_hidden_layers"] == 6
    gathers = [c for c in written["collectives_per_step"] if c["kind"] == "all_gather"]
    # 6 layers: 2 forward, 2 recomputed, 4 backward; head 1; embedding 1; 64 tokens of 64 bf16 numbers. Of the loss two
    # fp32 numbers a token from each rank
    activations = {"kind": "all_gather", "full_bytes": 64 * 64 * 2, "group_size": 2, "count": 6 * 8 + 2}
    sums = {"kind": "all_gather", "full_bytes": 2 * 64 * 4 * 2, "group_size": 2, "count": 1}
    assert gathers == [sums, activations]
    # The same measurement, on a device with no more memory than its reserve.
    monkeypatch.setattr(command, "run_worker", lambda request: answers[0])
    assert certify(monkeypatch, *options, "--device-memory-gib", 1.25) == 1
    assert_says(capsys.readouterr().out, "FAIL", "does not fit 1.25 GiB", "NOT certified")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--data.micro-batch-size 0", ("data.micro_batch_size", "0")),
        ("--seq-length 1", ("data.seq_length", "1")),
        ("--devices 3 --parallel.tensor-model-parallel-size 2", ("world size 3", "tensor_model_parallel_size 2")),
        ("--max-temp-ratio nan", ("--max-temp-ratio", "nan")),
        ("--max-temp-ratio 0.5", ("--max-temp-ratio 0.5 needs recomputation",)),
        ("--device-memory-gib -1", ("--device-memory-gib", "-1")),
        ("--model.config-overrides.num_hidden_layers x", ("num_hidden_layers", "'x'")),
        ("--model.config-overrides.num_hiden_layers 3", ("'num_hiden_layers'", "did you mean 'num_hidden_layers'")),
        ("--json absent/a.json", ("--json absent/a.json", "is no directory")),
        ("--device cuda", ("--device cuda", "pass --device-memory-gib")),
        ("--recipe llama3_8b", ("--model and --recipe both name a run",)),
        ("--measure-layers 3 3", ("--measure-layers 3 3",)),
        ("--measure-layers 4 8", ("--measure-layers 4 8", "at most 6, the model's")),
        (
            "--memory.recompute-granularity full --memory.recompute-method uniform --memory.recompute-num-layers 3",
            ("--measure-layers 2 3", "the first at least 3"),
        ),
        (
            "--memory.recompute-granularity full --memory.recompute-method uniform --memory.recompute-num-layers 2",
            ("--measure-layers 2 3", "multiples of memory.recompute_num_layers 2"),
        ),
        ("--model llama-3-9b", ("'llama-3-9b'", "did you mean 'llama-3-8b'")),
        ("--parallel.sequence-parallel-enabled", ("tensor_model_parallel_size",)),
    ],
)
def test_refusals(options, words):
    assert_says(error_message(lambda: read([*ARGUMENTS.split(), *options.split()])), *words)


@pytest.mark.parametrize(("is_installed", "chosen"), [(True, "xla"), (False, "cpu")])
def test_the_backend_that_is_chosen_is_one_that_works(is_installed, chosen, monkeypatch):
    monkeypatch.setattr("nxd_memopt.certify.command.is_importable", lambda module: is_installed)
    for arguments, expected in (([], chosen), (["--device", "trn2"], "cpu"), (["--backend", "cuda"], "cuda")):
        assert read(["--model", "gpt-neox-20b", *arguments]).request.backend == expected
