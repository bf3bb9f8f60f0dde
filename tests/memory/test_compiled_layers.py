"""Compiled layers: how many graphs, no fall back to eager, recompute, gradients of their own memory, names, errors."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory, compiled, is_compiled, is_recomputed
from nxd_memopt.modules.mlp import Activation
from tests.reference import assert_says, error_message
from tests.reference_models import batch, full_parameters, gpt_neox_config, hugging_face, llama_config, parallel_model

pytestmark = pytest.mark.skipif(backend.name != "cpu", reason="the facts do not depend on the device")

LAYERS = 12  # above torch._dynamo.config.recompile_limit, 8
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "norm", "mlp")}
SELECTIVE_BLOCK = {**SELECTIVE, "recompute_method": "block", "recompute_num_layers": 5}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Graphs made, and graphs run; what the library asks of torch.compile stays, but Inductor generates no code."""
    torch._dynamo.reset()
    found: Counter[str] = Counter()
    compile = torch.compile

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        found["made"] += 1
        made = lookup_backend("aot_eager_decomp_partition")(graph, inputs)

        def run(*args):
            found["run"] += 1
            return made(*args)

        return run

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, **options, backend=counting))
    return found


def gradients(model: nn.Module, **inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**(inputs or batch())).loss
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


def compiled_model(config, full=None, **memory) -> nn.Module:
    model = parallel_model(config, full, **memory)
    apply_memory(model, model.memory, compile="layer")
    return model


def require_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # fp32, other orders of sums; single elements cancel


# Graphs


@pytest.mark.parametrize(
    ("config", "memory", "again"),
    [
        pytest.param(llama_config, {}, 0, marks=pytest.mark.slow),
        (gpt_neox_config, SELECTIVE, 0),
        pytest.param(gpt_neox_config, {"recompute_granularity": "full"}, LAYERS, marks=pytest.mark.slow),
    ],
    ids=["none", "selective", "full"],
)
def test_twelve_layers_are_one_graph(config, memory, again, calls):
    """Replaced forwards that are guarded on by identity would make one graph a layer, and an error at the ninth.

    ``again`` layers run again in backward, outside their graph.
    """
    model = parallel_model(config(num_hidden_layers=LAYERS), **memory)
    expected = gradients(model)
    apply_memory(model, model.memory, compile="layer")
    require_equal(gradients(model), expected)
    assert calls == {"made": 1, "run": LAYERS + again}
    with torch.no_grad():  # evaluation is a graph of its own, and so is its batch's shape
        for rows in (3, 3, 2):
            model.eval()(**batch(rows=rows))
    require_equal(gradients(model.train()), expected)
    assert calls == {"made": 3, "run": 5 * LAYERS + 2 * again}


def test_layers_with_and_without_recompute_are_two_graphs(calls):
    model = parallel_model(gpt_neox_config(num_hidden_layers=LAYERS), **SELECTIVE_BLOCK)
    expected = gradients(model)
    apply_memory(model, model.memory, compile="layer")
    require_equal(gradients(model), expected)
    assert calls == {"made": 2, "run": LAYERS}


@pytest.mark.slow
def test_projections_of_every_count_are_traced_without_gradients(calls):
    """Here single column- and row-parallel layers with a bias; dynamo once left out the Function's ``ctx``."""
    config = gpt_neox_config(use_parallel_residual=False)
    model = parallel_model(config)
    with torch.no_grad():
        expected = model(**batch()).loss
        apply_memory(model, model.memory, compile="layer")
        torch.testing.assert_close(model(**batch()).loss, expected, rtol=1e-6, atol=0)
    model.requires_grad_(False)
    torch.testing.assert_close(model(**batch()).loss, expected, rtol=1e-6, atol=0)


class Breaking(Activation):
    """Cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_graph_break_is_an_error(calls):
    model = compiled_model(gpt_neox_config())
    for layer in model.decoder_layers():
        layer.mlp.act = Breaking("gelu")
    with pytest.raises(RuntimeError, match="a decoder layer cannot be compiled as one graph") as caught:
        model(**batch())
    assert_says(str(caught.value), "graph_break", "Set compile to null")
    assert not calls


@pytest.mark.slow
def test_more_graphs_than_torch_keeps_are_an_error(calls):
    """Not eager layers: with ``fullgraph=False`` torch runs what is above its limit as it is."""
    model = compiled_model(llama_config(num_hidden_layers=3))
    for i, layer in enumerate(model.decoder_layers()):
        layer.input_layernorm.eps = 1e-6 * (i + 1)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(RuntimeError, match="cannot be compiled"):
        model(**batch())
    assert calls["made"] == 2


# Memory


def held_bytes(model: nn.Module) -> int:
    """What backward needs but for parameters, each storage once."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = batch(rows=4, length=64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    loss.backward()
    return sum(found.values())


def test_compiled_layers_keep_what_eager_ones_do(calls):
    """In a graph the state of the random numbers is kept too, 5 KB a layer."""
    config = llama_config(num_hidden_layers=LAYERS, max_position_embeddings=64)
    eager = held_bytes(parallel_model(config, **SELECTIVE))
    torch._dynamo.reset()
    kept = held_bytes(compiled_model(config))
    torch._dynamo.reset()
    recomputed = held_bytes(compiled_model(config, **SELECTIVE))
    assert recomputed <= eager + LAYERS * 6144
    assert recomputed < kept


@pytest.mark.slow
def test_compiled_layers_with_and_without_recompute_keep_their_own(calls):
    """5 of 6 layers recompute: 5 of 6 parts of what recompute of all layers saves."""
    config = llama_config(num_hidden_layers=6, max_position_embeddings=64)
    kept = []
    for recompute in ({}, SELECTIVE, SELECTIVE_BLOCK):
        torch._dynamo.reset()
        kept.append(held_bytes(compiled_model(config, **recompute)))
    none, everything, some = kept
    assert everything < none and (none - some) * 6 == (none - everything) * 5


def test_recompute_in_a_graph_is_refused_where_torch_drops_it(monkeypatch):
    monkeypatch.setattr(compiled, "graphs_recompute", lambda: False)  # as torch 2.11
    model = parallel_model(llama_config(), **SELECTIVE)
    message = error_message(lambda: apply_memory(model, model.memory, compile="layer"))
    assert_says(message, "selective", torch.__version__, "recompute_granularity 'full'")
    apply_memory(model, MemoryConfig(recompute_granularity="full"), compile="layer")


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", [pytest.param({}, marks=pytest.mark.slow), {"recompute_granularity": "full"}], ids=["none", "full"]
)
def test_no_two_gradients_share_memory(recompute):
    """Inductor returns one buffer for GPT-NeoX's two equal bias gradients; the second pass would add to it twice."""
    torch._dynamo.reset()
    config = gpt_neox_config()
    full = full_parameters(hugging_face(config))
    eager, compiled = parallel_model(config, full, **recompute), compiled_model(config, full, **recompute)
    for model in (eager, compiled):
        for rows in (3, 3, 3):  # accumulates
            model(**batch(rows=rows)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # in place
    spans = sorted((param.grad.data_ptr(), param.grad.nbytes) for param in compiled.parameters())
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(spans))
    require_equal([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])


def test_recomputed_dropout_is_the_forwards():
    torch._dynamo.reset()
    config = gpt_neox_config(attention_dropout=0.2, hidden_dropout=0.2, num_hidden_layers=1)
    full = full_parameters(hugging_face(config))
    found = []
    for memory in ({}, {"recompute_granularity": "full"}):
        model = compiled_model(config, full, attention_backend="math", **memory).train()
        torch.manual_seed(4)
        found.append(gradients(model))
        torch.manual_seed(5)
        assert not torch.equal(gradients(model)[0], found[-1][0])
    require_equal(*found)


# Names, copies, taking it off


@pytest.mark.slow
def test_names_copies_and_taking_it_off(calls):
    config = llama_config()
    plain, model = parallel_model(config), compiled_model(config, recompute_granularity="full")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(0.5)
    before = gradients(model)
    plain.load_state_dict(twin.state_dict())
    require_equal(gradients(twin), gradients(plain))  # with its own parameters
    require_equal(gradients(model), before)
    assert all(map(is_compiled, (*model.decoder_layers(), *twin.decoder_layers())))
    runs = calls["run"]
    apply_memory(model, MemoryConfig(recompute_granularity="full"))
    assert not any(map(is_compiled, model.decoder_layers())) and all(map(is_recomputed, model.decoder_layers()))
    require_equal(gradients(model), before)
    assert calls["run"] == runs


# Errors


def test_a_compiler_that_is_turned_off_is_refused():
    """torch.compile would return the function itself."""
    program = "from nxd_memopt.backends import backend; print(backend.compile_refusal())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert_says(done.stdout, "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE", "unset it")


@pytest.mark.parametrize("attention_backend", ["auto", "sdpa"])
def test_packed_documents(attention_backend, calls):
    """One graph holds the attention of all documents by a mask, and none holds a call for each."""
    memory = MemoryConfig(attention_backend=attention_backend)
    model = parallel_model(llama_config(), attention_backend=attention_backend)
    ids = batch()["input_ids"]
    rows = range(ids.size(1), ids.numel() + 1, ids.size(1))
    inputs = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 3, *rows])}
    expected = gradients(model, **inputs)
    apply_memory(model, memory, compile="layer")
    if attention_backend == "sdpa":
        message = error_message(lambda: model(**inputs))
        assert_says(message, "cu_seqlens", attention_backend, "each document", "compile to null")
        return
    for found, want in zip(gradients(model, **inputs), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)  # fp32 sums in another order
