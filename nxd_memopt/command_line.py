"""The language of all commands: a command's own flags, a run's configuration, and dotted overrides of its options."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nxd_memopt._optional import require_installed
from nxd_memopt.architectures.configs import (
    NAMED_CONFIGS,
    load_model_config,
    require_known_keys,
    require_sizes,
    with_defaults,
    with_experts,
)
from nxd_memopt.architectures.parameters import require_supported_values
from nxd_memopt.architectures.published import published_name, spelled
from nxd_memopt.options import require_one_of
from nxd_memopt.planner.hardware import Device, device_named
from nxd_memopt.training.config.train_config import RECIPES, SECTIONS, TrainConfig

OVERRIDES = (
    "Every option of a run overrides the file's: --SECTION.OPTION VALUE, such as --data.seq-length 8192 or "
    "--parallel.tensor-model-parallel-size 8. nxd-memopt train --help shows them all."
)
INSTANCES = {
    "trn1.32xlarge": "trn1",
    "trn1n.32xlarge": "trn1n",
    "trn1.2xlarge": "trn1-2xlarge",
    "trn2.48xlarge": "trn2",
    "trn2.3xlarge": "trn2-3xlarge",
}
"""AWS instance type -> this library's name of it, in every command."""
# An instance with one of trn2's chips.
_SMALL_TRN2 = "trn2-3xlarge"
_SMALL_TRN2_RANKS = 4
_PLACEHOLDER = "DIRECTORY"


class FlagParser(argparse.ArgumentParser):
    """Parser of a command's own flags, without abbreviations; a ``ValueError`` of one line names what is wrong."""

    def __init__(self, command: str, description: str, **options: Any) -> None:
        super().__init__(prog=f"nxd-memopt {command}", description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError`` instead of printing the usage and exiting."""
        raise ValueError(f"{message.removeprefix('argument ')}; {self.prog} --help shows the options")


class Parser(FlagParser):
    """Parser of a command that is about a run: its own flags, and options of the run, with the nearest name.

    Args:
        command: name of the command.
        description: what it does.
        models: whether ``--model NAME`` and ``--seq-length`` may describe the run.
        options: options of ``argparse.ArgumentParser``.
    """

    def __init__(self, command: str, description: str, *, models: bool = False, **options: Any) -> None:
        options.setdefault("epilog", OVERRIDES)
        super().__init__(command, description, **options)
        self.add_argument("--config", metavar="FILE", help="YAML file of the run")
        self.add_argument("--recipe", metavar="NAME", help=f"configuration of the package: {', '.join(recipes())}")
        if models:
            names = ", ".join(NAMED_CONFIGS)
            self.add_argument("--model", metavar="NAME", help=f"{names}; or a config.json or its directory")
            self.add_argument("--seq-length", type=int, metavar="S", help="the same as --data.seq-length")

    def separate(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the command's own flags, and the arguments that describe the run as ``nxd-memopt train`` takes them.

        Raises:
            ValueError: a flag is unknown, or its value is not valid.
        """
        options, overrides = self.parse_known_args(list(arguments))
        for word in overrides:
            self._require_override(word.partition("=")[0])
        source: list[str] = []
        for name in ("config", "recipe"):
            if getattr(options, name) is not None:
                source += [f"--{name}", getattr(options, name)]
        return options, [*source, *overrides]

    def _require_override(self, name: str) -> None:
        """Raise ``ValueError`` for a flag that is neither the command's nor an option of a section."""
        # Of the sections, memory alone may be a word: --memory auto.
        if not name.startswith("--") or "." in name or name == "--memory":
            return
        sections = _options_of_sections()
        own = [flag for action in self._actions for flag in action.option_strings]
        meant = sections.get(name)
        if meant is None:
            close = difflib.get_close_matches(name, [*own, *sections], n=1)
            if not close:
                self.error(f"unknown option {name}")
            meant = sections.get(close[0], close[0])
        self.error(f"unknown option {name}: did you mean {meant}?")


def count(text: str) -> int:
    """Return a number of ranks, steps or rows; the ``type`` of a flag."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return int(text)


def require_directory(option: str, file: Path) -> None:
    """Raise ``ValueError`` if a file to be written is a directory, or is in none."""
    if file.is_dir():
        raise ValueError(f"{option} {file} is a directory: name a file in it")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: {file.absolute().parent} is no directory: create it, or name another file")


def recipes() -> list[str]:
    """Return the names of the configurations that are installed with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def device_and_ranks(name: str) -> tuple[Device, int]:
    """Return a device and the ranks of one host that has it.

    Raises:
        ValueError: the name is unknown.
    """
    name = INSTANCES.get(name, name)
    if name == _SMALL_TRN2:
        return device_named("trn2"), _SMALL_TRN2_RANKS
    device = device_named(name)
    return device, device.ranks_per_host


@dataclass(frozen=True)
class Run:
    """A run, of which a command computes what it needs.

    Args:
        name: how the user named it.
        config: its options.
        stated: names, without sections, of options that a file or the command line states.
        is_bare: only a model is named: the run has no configuration.
        overridden: ``SECTION.OPTION`` of the options that the command line states.
    """

    name: str
    config: TrainConfig
    stated: frozenset[str]
    is_bare: bool
    overridden: frozenset[str] = frozenset()

    def model_config(self) -> dict[str, Any]:
        """Return the model's complete config, with the experts that the ``moe`` section adds.

        Raises:
            ValueError: there is no such model, or it is not supported.
        """
        model = self.config.model
        require_known_keys("model.config_overrides", model.config_overrides)
        config = with_experts(with_defaults(self.file_config()), self.config.moe.given())
        require_sizes(config)
        require_supported_values(config, "its config.json")
        return config

    def file_config(self) -> dict[str, Any]:
        """Return the model's config as its file and the overrides have it."""
        model = self.config.model
        if model.pretrained is None:
            return dict(model.config_overrides)
        return load_model_config(model.pretrained) | model.config_overrides


def read_run(options: argparse.Namespace, arguments: Sequence[str]) -> Run:
    """Return the run that the arguments of a ``Parser`` with ``models`` describe.

    Raises:
        ValueError: no run or several are named, or a value is not valid.
    """
    require_installed("a run's options", "yaml", extra="train")
    sources = [name for name in ("model", "config", "recipe") if getattr(options, name) is not None]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]} both name a run: pass one")
    given = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    overridden = {name.removeprefix("--").replace(".no-", ".").replace("-", "_") for name in given}
    stated = {name.partition(".")[2] for name in overridden}
    arguments = list(arguments)
    if options.seq_length is not None:
        arguments += ["--data.seq-length", str(options.seq_length)]
        stated.add("seq_length")
    if options.model is not None:
        _require_model(options.model)
        # Of a model alone, rows have one document, and the recipes' precision.
        bare = ["--data.isolate-documents=false", "--trainer.precision=bf16-mixed"]
        arguments = ["--model.pretrained", options.model, *bare, *arguments]
    elif options.config is not None:
        stated |= _keys_of(Path(options.config))
    elif options.recipe is None and not any(name.startswith("--model.") for name in given):
        raise ValueError("no run is named: pass --model NAME, --config FILE or --recipe NAME")
    config = config_without_tokenizer(arguments)
    name = options.model or options.config or options.recipe or str(config.model.pretrained)
    return Run(name, config, frozenset(stated), options.model is not None, frozenset(overridden))


def config_without_tokenizer(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration of a run that is not trained here, and may lack a tokenizer.

    Raises:
        ValueError: as ``parse_config``.
    """
    from nxd_memopt.training.config.parsing import parse_config

    # Plans, certificates and dry runs read no tokenizer: a run without one is complete there.
    try:
        return parse_config(arguments)
    except ValueError:
        return parse_config([*arguments, "--model.tokenizer", _PLACEHOLDER])


def has_tokenizer(config: TrainConfig) -> bool:
    """Return whether a tokenizer is named in what ``config_without_tokenizer`` returns."""
    return config.model.tokenizer != _PLACEHOLDER


def _require_model(name: str) -> None:
    """Raise ``ValueError``, with the remedy, for what is no model's name, file or directory."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(f"--model {name} is the configuration of a run: pass it as --config {name}")
    if published_name(name) is not None or path.exists():
        return
    recipe = spelled(name, recipes())
    if recipe is not None:
        raise ValueError(f"--model {name} is a recipe: pass it as --recipe {recipe}")
    if len(path.parts) > 1 or path.suffix == ".json":
        raise ValueError(
            f"--model {name} does not exist: of a model of the Hugging Face Hub the config.json "
            "is enough: hf download ORGANIZATION/MODEL config.json --local-dir DIRECTORY, then --model DIRECTORY"
        )
    require_one_of("model", name, tuple(NAMED_CONFIGS))


def _keys_of(file: Path) -> set[str]:
    """Return all names that a YAML file gives a value, at any depth: NeMo has sections of its own."""
    from nxd_memopt.training.config.yaml_file import read_yaml_file

    found: set[str] = set()
    remaining = [read_yaml_file(file)]
    while remaining:
        value = remaining.pop()
        if isinstance(value, Mapping):
            found.update(map(str, value))
            remaining.extend(value.values())
    # NeMo's name.
    if "sequence_parallel" in found:
        found.add("sequence_parallel_enabled")
    return found


def _options_of_sections() -> dict[str, str]:
    """Return ``--OPTION`` -> ``--SECTION.OPTION`` of all options of a run."""
    found: dict[str, str] = {}
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            flag = field.name.replace("_", "-")
            found.setdefault(f"--{flag}", f"--{section.replace('_', '-')}.{flag}")
    return found
