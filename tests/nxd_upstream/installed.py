"""Installs this library's wheel into environments that already have an example's pinned transformers.

Each environment is created on demand under .venv-compat, like that of a user of the example:
PyTorch and the packages that the example pins. The wheel adds itself, and safetensors if it is
missing; it must not change other packages.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-compat"
PACKAGED = ("nxd_memopt", "models", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PINS = {
    "llama": ("transformers==4.48.0", "tokenizers==0.21.4", "huggingface_hub==0.36.0"),
    "mixtral": ("transformers==4.48.0", "tokenizers==0.21.4", "huggingface_hub==0.36.0"),
    "gpt_neox": ("transformers==4.26.0", "tokenizers==0.13.3", "huggingface_hub==0.36.0"),
}
# What scripts of these examples import besides.
SCRIPT_PACKAGES = {"transformers==4.48.0": ("datasets==3.6.0", "tensorboard==2.20.0")}


@functools.cache
def environment_with_wheel(example: str) -> Path:
    """Return an environment with the pins of ``example`` and this checkout's library.

    The first call takes minutes.

    Raises:
        RuntimeError: installing the library changed or removed another package or left unmet
            requirements, or the models do not report that they need transformers 5.
    """
    folder = require_environment(PINS[example])
    python = folder / "bin" / "python"
    _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "nxd_memopt"])
    before = installed_packages(python)
    with tempfile.TemporaryDirectory() as build:
        _run([python, "-m", "pip", "install", "--quiet", build_wheel(Path(build))])
    after = installed_packages(python)
    # An upgraded package is in ``before`` with its old version and in ``after`` with its new one,
    # so a difference in this direction finds upgrades as well as removals.
    if before - after:
        raise RuntimeError(f"installing nxd_memopt into {folder} changed {sorted(before - after)}")
    # pip freeze prints ``name==version``, or ``name @ file:...`` for the wheel. safetensors may be
    # new: transformers 4.26 came without it.
    added = {package.split("==")[0].split(" @ ")[0] for package in after - before}
    if not {"nxd_memopt"} <= added <= {"nxd_memopt", "safetensors"}:
        raise RuntimeError(f"installing nxd_memopt into {folder} added {sorted(added)}")
    _run([python, "-m", "pip", "check"])
    # If the checkout were imported, the comparison would not test what users install.
    location = _run([python, "-c", "import nxd_memopt; print(nxd_memopt.__file__)"]).strip()
    if not Path(location).is_relative_to(folder):
        raise RuntimeError(f"{python} imports nxd_memopt from {location}, not from its own environment")
    require_refusal(python)
    return folder


def require_refusal(python: Path) -> None:
    """Check that importing the models reports the needed and the installed transformers version."""
    program = (
        "import transformers\n"
        "try:\n"
        "    import nxd_memopt.models.llama\n"
        "except ImportError as error:\n"
        "    told = f'needs transformers 5.0 or newer, and {transformers.__version__} is installed'\n"
        "    assert told in str(error), error\n"
        "else:\n"
        "    raise AssertionError('the models were imported')\n"
    )
    _run([python, "-c", program])


def require_environment(pins: tuple[str, ...]) -> Path:
    """Create the environment of ``pins``, with our pinned PyTorch, unless it is complete."""
    # The marker is written last and has all pins: an environment that was interrupted, or made for
    # other pins, is built from the start.
    folder = ENVIRONMENTS / pins[0].replace("==", "-")
    done = folder / "complete.txt"
    requirements = (ROOT / "requirements" / "cpu.txt").read_text().split()
    pytorch = next(line for line in requirements if line.startswith("torch=="))
    packages = [pytorch, *pins, *SCRIPT_PACKAGES.get(pins[0], ())]
    content = "\n".join(packages)
    if not done.is_file() or done.read_text() != content:
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", folder])
        _run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages])
        done.write_text(content)
    return folder


def build_wheel(folder: Path) -> Path:
    """Build the checkout's wheel in ``folder`` and return its path."""
    # From a copy, because setuptools would reuse files of earlier builds in ./build.
    copy = folder / "source"
    copy.mkdir()
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run([*wheel, "--wheel-dir", folder, copy])
    return next(folder.glob("nxd_memopt-*.whl"))


def installed_packages(python: Path) -> set[str]:
    """Return ``name==version`` of every package in an environment."""
    return set(_run([python, "-m", "pip", "freeze"]).splitlines())


def _run(command: list[str | Path]) -> str:
    """Run a command and return its output; ``RuntimeError`` if it fails."""
    # Outside the checkout: with -m and -c Python puts the working directory on its path.
    with tempfile.TemporaryDirectory() as elsewhere:
        arguments = [str(each) for each in command]
        finished = subprocess.run(arguments, cwd=elsewhere, capture_output=True, text=True)
    if finished.returncode:
        output = f"{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
        raise RuntimeError(f"{command} failed:\n{output}")
    return finished.stdout
