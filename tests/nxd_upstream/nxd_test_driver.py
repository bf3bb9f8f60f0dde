"""One process of neuronx-distributed's tests, on this library under its name or on neuronx-distributed itself.

``run_nxd_tests.py`` starts it; a line ``RESULT {...}`` on standard output tells what passed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nxd_stubs import StubModule, install_stubs

import nxd_memopt.compat  # noqa: F401 (aliases neuronx_distributed, and stands in for torch_xla)
from nxd_memopt.compat.alias import AliasFinder

# Packages that no open index has, and those that only access to S3 needs.
CLOSED_PACKAGES = (
    "torch_neuronx",
    "neuronxcc",
    "libneuronxla",
    "nki",
    "nkilib",
    "botocore",
    "boto3",
    "tenacity",
)
XLA_PACKAGES = (
    "torch_xla.core",
    "torch_xla.utils",
    "torch_xla.distributed",
    "torch_xla.experimental",
)
# Modules and names that test files import for tests that are not selected: layers' helpers,
# quantization, and what is for inference.
UNUSED_MODULES = (
    "torch_neuronx.testing",
    "neuronx_distributed.parallel_layers.layers_utils",
    "neuronx_distributed.modules.moe.blockwise",
    "neuronx_distributed.quantization",
    "neuronx_distributed.quantization.quantize",
    "neuronx_distributed.quantization.quantization_config",
)
UNUSED_NAMES = {
    "neuronx_distributed.modules.moe.moe_configs": ("MoEFusedTKGConfig",),
    # What the pipeline tests replace, so that NxD's layers have no values.
    "neuronx_distributed.parallel_layers.layers": ("_initialize_affine_weight_neuron",),
}
# Variables of parallel_state that the MoE tests copy, to return to sizes that they had before. The
# selected tests have one size, so the copies are never written back.
COPIED_STATE = (
    *("_TENSOR_MODEL_PARALLEL", "_PIPELINE_MODEL_PARALLEL", "_EXPERT_MODEL_PARALLEL", "_DATA_PARALLEL"),
    *("_EXP_DATA_PARALLEL", "_TOKEN_SHUFFLE", "_KV_SHARED", "_NEXT_RANK", "_PREV_RANK"),
)
COPIED_VALUES = (
    *("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", "_MPU_TENSOR_MODEL_PARALLEL_RANK"),
    *("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE", "_MPU_EXPERT_MODEL_PARALLEL_RANK"),
    *("_TOKEN_SHUFFLE_GROUP_SIZE", "_KV_SHARED_GROUP_SIZE", "_PIPELINE_GLOBAL_RANKS", "PP_GROUP_PG_GLOO"),
)
Call = tuple[Callable[..., object], tuple[object, ...]]


def main() -> int:
    """Run one test file and print the result; the exit code is 0 even if tests fail."""
    parser = parser_of_library()
    parser.add_argument("kind", choices=("unit", "integration"))
    parser.add_argument("file", help="test file, relative to the source's test folder")
    parser.add_argument("--select", default="", help="unit: pytest's -k expression")
    args = parser.parse_args()
    set_up(args.library, args.source)
    if args.kind == "integration" and "pipeline" in args.file:
        os.environ["NXD_CPU_MODE"] = "1"  # these tests compare with one device only then
    file = args.source / "test" / args.file
    # Only rank 0 prints: its lists already combine the outcomes of all ranks.
    if args.kind == "unit":
        passed, failed = run_unit(file, args.select)
    else:
        passed, failed = run_integration(file)
    if args.kind == "unit" or dist.get_rank() == 0:
        print("RESULT", json.dumps({"passed": passed, "failed": failed}), flush=True)
    return 0


def parser_of_library() -> argparse.ArgumentParser:
    """Return a parser with the options for source tree and library."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True, help="neuronx-distributed's source tree")
    parser.add_argument("--library", choices=("nxd_memopt", "neuronx_distributed"), default="nxd_memopt")
    return parser


def set_up(library: str, source: Path) -> None:
    """Make ``import neuronx_distributed`` import the chosen library."""
    sys.argv = sys.argv[:1]  # the tests parse it too
    torch.set_num_threads(1)  # the ranks share the cores
    hide_newer_packages()
    # As neuronx-distributed's examples set it.
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    if library == "neuronx_distributed":
        use_neuronx_distributed(source / "src")
    else:
        install_stubs(*CLOSED_PACKAGES)
        stub_unused_names()


def hide_newer_packages() -> None:
    """Let old versions of transformers not find packages that need a newer one."""
    find_spec = importlib.util.find_spec

    def without_peft(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] == "peft" else find_spec(name, package)

    importlib.util.find_spec = without_peft  # pyright: ignore[reportAttributeAccessIssue]


def stub_unused_names() -> None:
    """Replace what the test files import, but the selected tests do not use, by stubs."""
    for name in UNUSED_MODULES:
        sys.modules[name] = StubModule(name)
    # The alias has torch_neuronx, which imports no module that is only named.
    importlib.import_module("torch_neuronx").testing = sys.modules["torch_neuronx.testing"]  # pyright: ignore[reportAttributeAccessIssue]
    for module, names in UNUSED_NAMES.items():
        for name in names:
            setattr(importlib.import_module(module), name, getattr(StubModule(module), name))
    state = vars(importlib.import_module("neuronx_distributed.parallel_layers.parallel_state"))
    for name in COPIED_STATE:
        state.update({f"{name}_GROUP": None, f"{name}_GROUP_SPMD": None})
    state.update(dict.fromkeys(COPIED_VALUES))


class _LenientFinder(AliasFinder):
    """Alias finder that leaves unknown modules to the finders after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias module, or None if the table does not have it."""
        try:
            return super().find_spec(fullname, path, target)
        except ModuleNotFoundError:
            return None


def use_neuronx_distributed(path: Path) -> None:
    """Use neuronx-distributed's own source, in its CPU mode, with our replacement of torch_xla."""
    # Importing nxd_memopt.compat has installed alias finders. That of neuronx_distributed is
    # removed, so that the source is found on sys.path. That of torch_xla stays, but modules that it
    # does not have become stubs instead of an ImportError: the stub finder is after it.
    for finder in [finder for finder in sys.meta_path if isinstance(finder, AliasFinder)]:
        sys.meta_path.remove(finder)
        if finder.root == "torch_xla":
            sys.meta_path.insert(0, _LenientFinder(finder.root, finder.table))
    install_stubs(*CLOSED_PACKAGES, *XLA_PACKAGES, "transformers.utils.fx")
    platform: Any = importlib.import_module("torch_neuronx.utils")
    platform.get_platform_target = lambda: "trn1"
    # Annotations in neuronx-distributed name the classes of torch_neuronx's C++ extension.
    torch.classes.neuron = StubModule("neuron")  # pyright: ignore[reportAttributeAccessIssue]
    sys.path.insert(0, str(path))
    os.environ["NXD_CPU_MODE"] = "1"


class _Counter:
    """Pytest plugin that records which tests passed and failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test, or of a failing set-up or tear-down."""
        # A set-up that passes is no outcome. A test that skips itself counts as failed: it is
        # missing from those that pass on neuronx-distributed.
        if report.when != "call" and not report.failed:
            return
        name = report.nodeid.rpartition("::")[2]
        if report.passed:
            self.passed.append(name)
        else:
            self.failed.append(name)


def run_unit(file: Path, select: str) -> tuple[list[str], list[str]]:
    """Run a file with pytest; return the names of passed and failed tests."""
    counter = _Counter()
    # -c /dev/null: neither this repository's pytest configuration nor neuronx-distributed's.
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull]
    options += ["--rootdir", str(file.parent), "-k", select]
    pytest.main([*options, str(file)], plugins=[counter])
    return counter.passed, counter.failed


def run_integration(file: Path) -> tuple[list[str], list[str]]:
    """Call the file's test functions like its ``__main__``, and continue after a failure.

    Returns:
        Names of passed and failed tests; a test passes if it passes on all ranks.
    """
    dist.init_process_group("xla", timeout=timedelta(seconds=300))
    sys.path[:0] = [str(file.parent), str(file.parent.parent)]
    module = importlib.import_module(file.stem)
    passed: list[str] = []
    failed: list[str] = []
    for name, call in CALLS[file.stem](module):
        # The gather also keeps the ranks in step: no rank starts the next test while another one
        # is still in this test's collectives.
        outcomes: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(outcomes, succeeds(call))
        if all(outcomes):
            passed.append(name)
        else:
            failed.append(name)
    return passed, failed


def succeeds(call: Call) -> bool:
    """Return whether a test function returns without an error, which is printed."""
    function, arguments = call
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()
        return False
    finally:
        # A test that failed may leave its groups; the next one initializes other sizes.
        state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
        if state.model_parallel_is_initialized():
            state.destroy_model_parallel()
    return True


def tensor_parallel_sizes() -> list[int]:
    """Return the powers of two up to the world size."""
    world_size = dist.get_world_size()
    return [2**i for i in range(world_size.bit_length()) if 2**i <= world_size]


def layer_calls(module: ModuleType) -> Iterator[tuple[str, Call]]:
    """Yield the tests of layers at each size, except the test of an XLA graph's text."""
    # The module's helpers are called test_ too. Most tests take a size and a device, some a size.
    helpers = ("test_init", "test_cleanup", "test_modules")
    tests = [name for name in vars(module) if name.startswith("test_") and name not in helpers]
    without_device = ("test_initialize_parameter_cpu", "conv")
    for size in tensor_parallel_sizes():
        for name in tests:
            if "HLO" in name:
                continue
            arguments: tuple[object, ...] = (size,)
            if not any(part in name for part in without_device):
                arguments = (size, module.xm.xla_device())
            yield f"{name}[{size}]", (getattr(module, name), arguments)


def calls_by_size(*names: str) -> Callable[[ModuleType], Iterator[tuple[str, Call]]]:
    """Return a function that yields the named tests at each size."""

    def calls(module: ModuleType) -> Iterator[tuple[str, Call]]:
        for size in tensor_parallel_sizes():
            for name in names:
                yield f"{name}[{size}]", (getattr(module, name), (size,))

    return calls


def qkv_calls(module: ModuleType) -> Iterator[tuple[str, Call]]:
    """Yield the test of the QKV layer with separate and with fused parameters."""
    size = dist.get_world_size()
    for fuse_qkv in (False, True):
        test = module.test_qkv_linear_with_kv_multipler_1
        yield f"{test.__name__}[{size}-{fuse_qkv}]", (test, (size, fuse_qkv))


def stage_calls(module: ModuleType) -> Iterator[tuple[str, Call]]:
    """Yield the tests of transfers between as many stages as there are ranks."""

    def on_stages(test: Callable[[], object]) -> None:
        module.initialize_model_parallel(1, dist.get_world_size())
        test()

    # The third one sends an object of a class, which NxD pickles: the sender refuses it, and the receivers would wait.
    for name in ("test_send_and_recv", "test_1f_1b_comm"):
        yield name, (on_stages, (getattr(module, name),))


def manual_stage_calls(module: ModuleType) -> Iterator[tuple[str, Call]]:
    """Yield the trainings of manual stages, with separate and with shared weights."""

    def train(stages: int, shared: bool) -> None:
        initialize(1, stages)
        module.test_training(weight_sharing=shared)

    world_size = dist.get_world_size()
    for stages in (2, world_size):
        for shared in (False, True):
            yield f"test_training[{stages}-{shared}]", (train, (stages, shared))


def tensor_parallel_stage_calls(module: ModuleType) -> Iterator[tuple[str, Call]]:
    """Yield the trainings of manual stages of tensor-parallel layers; uneven stages need four of them."""

    def train(stages: int, uneven: bool) -> None:
        initialize(2, stages)
        module.test_tp_pp_train(2, stages, uneven)

    stages = dist.get_world_size() // 2
    for uneven in (False, True):
        if stages > 2 or not uneven:
            yield f"test_tp_pp_train[{stages}-{uneven}]", (train, (stages, uneven))


def initialize(tensor: int, pipeline: int) -> None:
    """Create the process groups."""
    state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
    state.initialize_model_parallel(tensor, pipeline)


CALLS: dict[str, Callable[[ModuleType], Iterator[tuple[str, Call]]]] = {
    "test_layers": layer_calls,
    "test_loss_functions": calls_by_size(
        "test_parallel_cross_entropy",
        "test_parallel_logits_to_logprobs",
    ),
    "test_parallel_state": calls_by_size(
        "test_initialize_model_parallel",
        "test_get_tensor_model_parallel_src_rank",
    ),
    "test_qkv_linear": qkv_calls,
    "test_comm": stage_calls,
    "test_training_pp": manual_stage_calls,
    "test_training_tp_pp": tensor_parallel_stage_calls,
}

if __name__ == "__main__":
    sys.exit(main())
