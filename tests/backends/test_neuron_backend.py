"""The native Neuron backend on a stand-in device: detection, placement, order of calls, and whole models in shapes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nxd_memopt.backends.attention_call import AttentionCall
from nxd_memopt.backends.neuron import native as neuron
from nxd_memopt.backends.neuron.native import NeuronBackend
from tests.reference import assert_says, error_message

ROOT = Path(__file__).parents[2]
FALLBACK = "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS"
LATE = f"{FALLBACK} was not set when torch imported torch_neuronx"
needs_stand_in = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python; TorchNeuron needs torch 2.13 anyway",
)


def world(**environment: str) -> dict[str, str]:
    """torchrun's variables for a world of one process."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    } | environment


def on_neuron(*arguments: str, **environment: str) -> str:
    """Output of a process that has the stand-in; one device, unless ``environment`` says otherwise."""
    unset = {"NXD_MEMOPT_BACKEND", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NEURON_RT_VISIBLE_CORES", FALLBACK}
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    paths = {"PYTHONPATH": f"{ROOT / 'tests/neuron/stand_in'}:{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=clean | paths | environment, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


# ---- which package is there ------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a ``torch_neuronx`` of given files and metadata; importing its ``__init__`` runs ``body``."""

    def write(version: str | None, modules: tuple[str, ...], body: str = "raise RuntimeError('was imported')"):
        package = tmp_path / "torch_neuronx"
        package.mkdir()
        (package / "__init__.py").write_text(body, encoding="ascii")
        for name in modules:
            (package / f"{name}.py").write_text("", encoding="ascii")
        if version is not None:
            metadata = tmp_path / f"torch_neuronx-{version}.dist-info"
            metadata.mkdir()
            text = f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n"
            (metadata / "METADATA").write_text(text, encoding="ascii")
        importlib.invalidate_caches()

    monkeypatch.setenv(FALLBACK, "1")  # so that it is put back
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    sys.modules.pop("torch_neuronx", None)


def test_absent_package():
    assert NeuronBackend.unavailable_reason() == "torch_neuronx is not installed"


@pytest.mark.parametrize(
    ("version", "modules", "facts"),
    [
        ("2.9.0.2.11.19912", ("xla_impl",), ["torch_neuronx 2.9.0.2.11.19912", "PyTorch/XLA build", "backend xla"]),
        (None, ("xla_impl",), ["of unknown version", "PyTorch/XLA build"]),
        ("1.0", (), ["torch_neuronx 1.0", "not TorchNeuron"]),
    ],
)
def test_other_packages_of_the_name_are_not_taken(install, monkeypatch, version, modules, facts):
    """Nor imported, for the sake of the question; ``torch.neuron`` proves nothing."""
    monkeypatch.setattr(torch, "neuron", object(), raising=False)
    install(version, modules)
    assert_says(NeuronBackend.unavailable_reason() or "", *facts)


@pytest.mark.parametrize(("version", "modules"), [("2.10.1", ()), ("2.13.3.0", ()), (None, ("neuron_dynamo_backend",))])
def test_native_package_without_a_device(install, monkeypatch, version, modules):
    install(version, modules, "import torch\ntorch.neuron.imported = True")
    monkeypatch.setattr(torch, "neuron", type("Module", (), {"device_count": lambda: 0}), raising=False)
    assert_says(NeuronBackend.unavailable_reason() or "", "is native", "no Neuron device is visible")
    assert torch.neuron.imported


def test_native_package_whose_runtime_is_missing(install):
    install("2.13.3.0", (), "raise OSError('libnrt.so.1: cannot open shared object file')")
    assert_says(NeuronBackend.unavailable_reason() or "", "cannot be imported", "OSError", "libnrt.so.1")


# ---- the device ------------------------------------------------------------------------------------------------------

LIFE = """
import json, os, torch
from nxd_memopt.backends import backend, BACKEND_REASON
import torch_neuronx
facts = {"reason": BACKEND_REASON, "before": str(backend.device), "fallback": torch_neuronx.FALLBACK_AT_IMPORT}
backend.init_process_group()
facts["calls"] = list(torch_neuronx.CALLS)
facts["device"] = str(backend.device)
torch.neuron.allocated, torch.neuron.peak = 5, 9
facts["memory"] = [backend.memory_allocated(), backend.max_memory_allocated()]
backend.reset_peak_memory_stats()
facts["memory"].append(backend.max_memory_allocated())
backend.manual_seed(3)
state = backend.get_rng_state()
backend.manual_seed(4)
backend.set_rng_state(state)
facts["seed"] = torch.neuron.seeds[0]
from torch_neuronx.neuron_dynamo_backend import GRAPHS
double = backend.compile(lambda x: x * 2)
facts["compiled"] = [double(torch.ones(n, 3)).sum().item() for n in (2, 5, 7)]
facts["graphs"] = GRAPHS
x = torch.ones(2, requires_grad=True)
runs = []
backend.checkpoint(lambda x: runs.append(1) or x.exp(), x).sum().backward()
facts["runs"] = len(runs)
print(json.dumps(facts))
"""


@needs_stand_in
def test_the_life_of_a_process():
    facts = json.loads(on_neuron("-c", LIFE, **world()).splitlines()[-1])
    assert_says(facts["reason"], "neuron is the best available", "torch_neuronx 2.13.3.0, native")
    assert (facts["before"], facts["device"]) == ("neuron", "neuron:0")
    assert facts["fallback"] == "1"  # set before the package was imported
    assert facts["calls"] == [["process_group", 0, 1]]  # the group comes before any use of the device
    assert facts["memory"] == [5, 9, 5]  # the stand-in fails unless synchronize() comes before each
    assert facts["seed"] == 3
    assert facts["compiled"] == [12.0, 30.0, 42.0]
    assert facts["graphs"] == [[[2, 3]], [[5, 3]], [[7, 3]]]  # another shape is another graph, none is dynamic
    assert facts["runs"] == 2


LAYERS = """
import json, torch
from nxd_memopt.memory import apply_memory
from tests.reference_models import batch, llama_config, parallel_model
from torch_neuronx.neuron_dynamo_backend import GRAPHS
memory = {"attention_backend": "math", "recompute_granularity": "full"}
model = parallel_model(llama_config(num_hidden_layers=12), **memory)  # on the CPU: the stand-in has no numbers
expected = model(**batch()).loss
apply_memory(model, model.memory, compile="layer")
facts = {"difference": (model(**batch()).loss - expected).item(), "graphs": [len(GRAPHS)]}
model(**batch(rows=2)).loss.backward()
model(**batch()).loss.backward()
facts["graphs"].append(len(GRAPHS))
facts["gradients"] = all(param.grad is not None for param in model.parameters())
model.decoder_layers()[0].mlp.forward = lambda x: torch._dynamo.graph_break() or x
try:
    model(**batch())
except RuntimeError as error:
    facts["error"] = str(error)
print(json.dumps(facts))
"""


@pytest.mark.slow
@needs_stand_in
def test_layers_are_compiled_for_the_device():
    """One graph for all layers, one more for another shape; a graph break is an error."""
    facts = json.loads(on_neuron("-c", LAYERS, NXD_MEMOPT_BACKEND="neuron").splitlines()[-1])
    assert facts["difference"] == 0 and facts["gradients"]
    assert facts["graphs"] == [1, 2]
    assert_says(facts["error"], "a decoder layer cannot be compiled as one graph")


SAID = "from nxd_memopt.backends import backend, BACKEND_REASON; print(backend.device, BACKEND_REASON)"


@needs_stand_in
@pytest.mark.parametrize(
    ("code", "environment", "facts"),
    [
        pytest.param(SAID, {FALLBACK: "0"}, ["neuron:0", "silently", f"{FALLBACK} is not 1"], marks=pytest.mark.slow),
        (f"import torch_neuronx; {SAID}", {}, [LATE, f"export {FALLBACK}=1"]),
        (SAID, {"STAND_IN_DEVICES": "0"}, ["cpu", "no neuron: torch_neuronx 2.13.3.0 is native, but no Neuron device"]),
    ],
)
def test_what_the_reason_says(code, environment, facts):
    assert_says(on_neuron("-c", code, **environment), *facts)


WARNED = """
import warnings
{}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import nxd_memopt.backends
    nxd_memopt.backends.select_backend("cpu")
print(*[each.message for each in caught if "FALLBACK" in str(each.message)], sep="\\n")
"""


@needs_stand_in
@pytest.mark.parametrize(
    ("imported_first", "environment", "count"),
    [
        ("import torch_neuronx", {}, 1),  # as torch's device autoload does
        pytest.param(
            "import torch_neuronx", {"RANK": "3"}, 0, marks=pytest.mark.slow
        ),  # one process of the world says it
        pytest.param("", {}, 0, marks=pytest.mark.slow),  # in time
    ],
)
def test_a_late_fallback_variable_is_warned_about_once(imported_first, environment, count):
    lines = on_neuron("-c", WARNED.format(imported_first), **environment).splitlines()
    assert [line.startswith(LATE) for line in lines if line] == [True] * count


BY_THE_GROUP = """
import torch, torch_neuronx
import torch.distributed as dist
from nxd_memopt.backends import backend
kept = backend.device
{}
print(kept, backend.device, backend.device, torch.neuron.current_device())
"""


@needs_stand_in
@pytest.mark.parametrize(
    ("joined", "cores"),
    [
        # torchrun: all cores are visible, and the group takes that of LOCAL_RANK. Kubernetes, srun: one core.
        ("backend.init_process_group()", {"STAND_IN_DEVICES": "64"}),
        pytest.param(
            "dist.init_process_group('neuron')",
            {"STAND_IN_DEVICES": "64", "NEURON_RT_VISIBLE_CORES": "37"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_process_group_assigns_the_device(cores, joined):
    environment = world(LOCAL_RANK="5", LOCAL_WORLD_SIZE="6", **cores)
    found = on_neuron("-c", BY_THE_GROUP.format(joined), **environment).split()
    assert found == ["neuron", "neuron:5", "neuron:5", "5"]


@pytest.mark.parametrize(
    ("environment", "devices", "facts"),
    [
        ({"LOCAL_RANK": "5"}, 4, ["LOCAL_RANK 5", "6 Neuron devices", "4 visible", "NEURON_LOGICAL_NC_CONFIG"]),
        ({"LOCAL_RANK": "5"}, 6, None),
        ({"LOCAL_RANK": "5", "NEURON_RT_VISIBLE_CORES": "37"}, 1, None),
        (
            {"LOCAL_RANK": "5", "NEURON_RT_VISIBLE_CORES": "0-63"},
            64,
            ["0-63", "64 cores", "one per process", "unset it"],
        ),
    ],
)
def test_each_process_needs_one_core(monkeypatch, environment, devices, facts):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if facts is None:
        neuron._require_a_core(devices)
    else:
        assert_says(error_message(lambda: neuron._require_a_core(devices)), *facts)


# ---- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({}, None),
        ({"query_shape": (1, 8, 1000, 64)}, ["1000", "512", "pad to 1024"]),
        ({"query_shape": (65, 8, 512, 64)}, ["65 sequences of 8 heads", "512", "lower the micro-batch size"]),
        ({"window": 64}, ["window of 64", "S x S"]),
    ],
)
def test_fused_attention_runs_where_its_kernel_does(change, facts):
    call = {"query_shape": (1, 8, 1536, 128), "kv_heads": 8, "masked": False, "dropout_p": 0.0, "dtype": torch.bfloat16}
    backend = object.__new__(NeuronBackend)
    reason = backend.attention_refusal("sdpa", AttentionCall(**(call | change)))
    if facts is None:
        assert reason is None
    else:
        assert_says(reason or "", *facts)
    assert backend.attention_refusal("tiled", AttentionCall(**(call | change))) is None


# ---- whole models ----------------------------------------------------------------------------------------------------


MODELS = {
    # name:length:option, then calls of the fused kernel and dtypes of tensors that hold a square of the sequence
    "llama:1024": (2, []),  # 2 layers; KV heads are repeated for the kernel
    "llama:1024:sharded": (2, []),
    "gpt_neox:1024:recompute": (4, []),  # each layer again in backward
    "llama:640": (0, []),  # not a multiple of 512: tiles
    "gpt_neox:640:padded": (0, ["torch.bool"]),  # the mask itself, and no scores
}


@needs_stand_in
def test_models_run_on_the_device_without_a_square():
    lines = on_neuron("-m", "tests.neuron.fake_models", *MODELS).splitlines()[1:]
    assert lines == [
        f"loss neuron:0 (); fused calls {calls}; squares {squares}; devices ['neuron:0']; gradients missing []"
        for calls, squares in MODELS.values()
    ]
