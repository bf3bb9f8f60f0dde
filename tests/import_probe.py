"""Reports, as JSON, what works in a process without transformers or with another version: ``-m tests.import_probe``.

Arguments are top-level packages to hide, as if they were not installed. The last line of the output is the report.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import nxd_memopt

PACKAGE = Path(nxd_memopt.__file__).parent
NEED_EXTRAS = (
    "nxd_memopt.certify.report.render",  # cli
    "nxd_memopt.certify.worker",  # models
    "nxd_memopt.commands.convert_checkpoint",  # train
    "nxd_memopt.modules.moe.gpt_neox_config",  # models
)
NEED_THE_TRAIN_EXTRA = ("nxd_memopt.training.", "nxd_memopt.launch.", "nxd_memopt.selftest.")
MODELS = ("nxd_memopt.models", "nxd_memopt.models.gpt_neox", "nxd_memopt.models.llama")


class Hider(MetaPathFinder):
    """Answers an import of the hidden packages as Python does for one that is not installed."""

    def __init__(self, hidden: list[str]) -> None:
        self.hidden = hidden

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        name = fullname.split(".")[0]
        if name in self.hidden:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=name)


def main(hidden: list[str]) -> dict[str, Any]:
    sys.meta_path.insert(0, Hider(hidden))
    report: dict[str, Any] = {}
    importlib.import_module("nxd_memopt.config")
    report["loaded by config"] = loaded("torch", "transformers")
    exec("from nxd_memopt import *", {})
    report["failed"] = {name: message for name in core_modules() if (message := error_of(import_of(name)))}
    report["loaded by the core"] = loaded("transformers")
    report["models"] = {name: error_of(import_of(name)) for name in MODELS}
    report["models as an attribute"] = error_of(lambda: nxd_memopt.models)
    with tempfile.TemporaryDirectory() as folder:
        report |= use_the_core(Path(folder))
    report["doctor"] = run_command("doctor")
    report["convert"] = run_command("convert", "--source", "absent", "--target", "out")
    return report


def core_modules() -> list[str]:
    """Return the names of all modules but those that need extras, Triton's kernels and ``compat``'s program."""
    paths = [path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py"))]
    paths = [path for path in paths if not path.name.endswith("_kernels.py") and path.parts[1] != "models"]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    names = [name for name in names if not name.startswith(NEED_THE_TRAIN_EXTRA)]
    return [name for name in names if name not in NEED_EXTRAS and not name.endswith(".__main__")]


def loaded(*names: str) -> list[str]:
    return [name for name in names if name in sys.modules]


def import_of(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(name)


def error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{'ImportError' if isinstance(error, ImportError) else type(error).__name__}: {error}"
    return None


def use_the_core(folder: Path) -> dict[str, Any]:
    """Train a layer through the alias, store and load it; then call what needs transformers."""
    import torch
    from safetensors.torch import save_file

    from nxd_memopt import checkpoint
    from nxd_memopt.optimizer import AdamW

    layers = importlib.import_module("neuronx_distributed.parallel_layers.layers")
    torch.manual_seed(0)
    model = layers.ColumnParallelLinear(4, 6, bias=False)
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).square().sum().backward()
    AdamW(model.parameters(), lr=0.1).step()
    state = checkpoint.TrainingState(model)
    checkpoint.save_training_state(folder / "state", 1, state=state, config={})
    trained = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    step = checkpoint.load_training_state(folder / "state", state=state, config={}).step
    resumed = model.weight.detach().clone()

    hf, gguf = folder / "hf", folder / "gguf"
    hf.mkdir()
    gguf.mkdir()
    (gguf / "a.gguf").write_bytes(b"GGUF")
    (hf / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": before}, hf / "model.safetensors")
    checkpoint.load_pretrained(model, hf)
    export = folder / "export"
    return {
        "trained": not torch.equal(trained, before) and bool(trained.isfinite().all()),
        "resumed": step == 1 and torch.equal(resumed, trained),
        "loaded safetensors": torch.equal(model.weight, before),
        "load_config": error_of(lambda: checkpoint.load_config(hf)),
        "save_pretrained": error_of(lambda: checkpoint.save_pretrained(model, export)),
        "written": sorted(path.name for path in folder.glob("*export*")),
        "gguf": error_of(lambda: checkpoint.load_pretrained(model, gguf)),
    }


def run_command(*arguments: str) -> dict[str, Any]:
    from nxd_memopt import cli

    sys.argv = ["nxd-memopt", *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = cli.main()
    return {"status": status, "output": output.getvalue(), "errors": errors.getvalue()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
