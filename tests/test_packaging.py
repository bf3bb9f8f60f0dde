"""Packaging: what an installation requires, and what works without transformers or beside an older one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from nxd_memopt._optional import (
    TRANSFORMERS_VERSION,
    MissingDependencyError,
    require_installed,
    require_transformers,
)

ROOT = Path(__file__).resolve().parent.parent
FEATURES = ("models", "models as an attribute", "load_config", "save_pretrained", "gguf")


@pytest.fixture
def older_transformers(tmp_path: Path) -> Path:
    """A folder with a package that passes for transformers 4.48.0, which NxD's LLaMA example pins."""
    package = tmp_path / "older" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "4.48.0"\n')
    return package.parent


def run(arguments: list[str], path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository, with ``path`` before every other package."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(each) for each in (path, ROOT, inherited) if each]
    environment = {**os.environ, "NXD_MEMOPT_BACKEND": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def probe(*hidden: str, path: Path | None = None) -> dict:
    finished = run(["-m", "tests.import_probe", *hidden], path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


def messages(report: dict) -> dict[str, str]:
    """By feature; those of the modeling files by module."""
    flat = {name: report[name] for name in FEATURES if name != "models"}
    return {**report["models"], **flat}


def assert_core_works(report: dict) -> None:
    assert report["failed"] == {}
    assert report["loaded by config"] == [] and report["loaded by the core"] == []
    assert report["trained"] and report["resumed"] and report["loaded safetensors"]
    assert report["written"] == [], "save_pretrained left files"


@pytest.mark.slow
def test_without_transformers_and_the_command_lines_packages() -> None:
    report = probe("transformers", "tokenizers", "huggingface_hub", "rich")
    assert_core_works(report)
    for feature, message in messages(report).items():
        extra = "gguf" if feature == "gguf" else "models"
        assert message.startswith("ImportError: "), feature
        remedy = f"needs transformers 5.0 or newer, and it is not installed: pip install 'nxd_memopt[{extra}]'"
        assert remedy in message, feature
    assert report["doctor"]["status"] == 0
    assert "models: not available: nxd_memopt.models needs transformers 5.0" in report["doctor"]["output"]
    assert report["convert"]["status"] == 2
    assert "needs transformers 5.0 or newer" in report["convert"]["errors"]


@pytest.mark.slow
def test_beside_an_older_transformers(older_transformers: Path) -> None:
    report = probe(path=older_transformers)
    assert_core_works(report)
    for feature, message in messages(report).items():
        assert message.startswith("ImportError: "), feature
        assert "needs transformers 5.0 or newer, and 4.48.0 is installed: pip install 'nxd_memopt[" in message, feature
    assert "4.48.0 is installed" in report["doctor"]["output"]
    assert report["convert"]["status"] == 2 and "4.48.0 is installed" in report["convert"]["errors"]
    assert report["convert"]["errors"].count("\n") == 1


def test_with_transformers_the_models_import_and_the_core_does_not_load_it() -> None:
    report = probe()
    assert set(report["models"].values()) == {None}
    assert report["failed"] == {} and report["loaded by config"] == [] and report["loaded by the core"] == []
    assert "models: available (transformers 5." in report["doctor"]["output"]


def test_the_training_script_says_so_in_one_line(older_transformers: Path) -> None:
    data = ["--model.tokenizer", str(older_transformers), "--data.dataset", "stdlib"]
    finished = run(["-m", "nxd_memopt.training", "--recipe", "llama3_8b", *data], older_transformers)
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1, finished.stderr
    assert "nxd_memopt.training needs transformers 5.0 or newer, and 4.48.0 is installed" in finished.stderr
    assert "pip install 'nxd_memopt[train]'" in finished.stderr


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0rc3"])
def test_refused_versions(monkeypatch, version):
    stub = ModuleType("transformers")
    stub.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "transformers", stub)
    with pytest.raises(MissingDependencyError, match=f"and {re.escape(version)} is installed") as refused:
        require_transformers("this")
    assert refused.value.name == "transformers"


@pytest.mark.parametrize("version", ["5.0", "5.18.0.dev0", "10.0"])
def test_accepted_versions(monkeypatch, version):
    stub = ModuleType("transformers")
    stub.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "transformers", stub)
    assert require_transformers("this") is stub


def test_a_folder_of_that_name_is_not_transformers(monkeypatch, tmp_path):
    (tmp_path / "transformers").mkdir()
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match=rf"{re.escape(str(tmp_path))}.*is not transformers"):
        require_transformers("this")
    sys.modules.pop("transformers")


def test_a_broken_transformers_is_told_from_an_absent_one(monkeypatch, tmp_path):
    (tmp_path / "transformers.py").write_text("import absent_dependency\n")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"cannot be imported .*absent_dependency"):
        require_transformers("this")


def test_require_installed_names_what_is_missing():
    require_installed("this", "json", "torch", extra="train")
    with pytest.raises(MissingDependencyError, match=r"this needs absent_a, absent_b, not .*'nxd_memopt\[train\]'"):
        require_installed("this", "absent_a", "json", "absent_b", extra="train")


# Metadata, as a wheel of this checkout has it


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> metadata.Distribution:
    folder = tmp_path_factory.mktemp("metadata")
    backend = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    finished = subprocess.run([sys.executable, "-c", backend, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return metadata.Distribution.at(next(folder.glob("*.dist-info")))


def requirements(distribution: metadata.Distribution, extra: str = "") -> dict[str, Requirement]:
    """What is installed with ``extra``, without it what always is, by name."""
    parsed = [Requirement(text) for text in distribution.requires or ()]
    return {each.name: each for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra})}


def test_the_core_requires_no_transformers(distribution):
    assert set(requirements(distribution)) == {"torch", "safetensors", "numpy", "packaging"}


def test_the_extras_that_models_need_require_the_version_that_is_checked(distribution):
    for extra in ("models", "train", "gguf", "dev"):
        specifier = requirements(distribution, extra)["transformers"].specifier
        assert str(specifier) == f">={TRANSFORMERS_VERSION}", extra
    for extra in ("cli", "flash4", "flash4-cu13"):
        assert "transformers" not in requirements(distribution, extra), extra


def test_every_requirement_has_a_pin_that_it_allows(distribution):
    files = ("common", "cpu", "dev")
    text = "\n".join((ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8") for name in files)
    pins = {name.lower(): version for name, version in re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)}
    needed = requirements(distribution, "dev")
    assert {"rich", "gguf", "pytest", "torch"} <= set(needed)
    for name, requirement in needed.items():
        assert requirement.specifier.contains(pins[name.lower()]), name


def test_the_earliest_python_is_the_first_that_the_classifiers_name(distribution):
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(distribution.metadata.get_all("Classifier") or ()))
    assert distribution.metadata["Requires-Python"] == f">={named[0]}"
