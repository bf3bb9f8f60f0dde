"""What ``nxd-memopt plan --model`` names: the model, and the options of a run that its YAML states."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_memopt.architectures.configs import (
    NAMED_CONFIGS,
    load_model_config,
    require_known_keys,
    require_sizes,
    with_defaults,
    with_experts,
)
from nxd_memopt.architectures.model_spec import moe_layers
from nxd_memopt.architectures.parameters import require_supported_values
from nxd_memopt.config import MemoryConfig, ParallelConfig, require_one_of
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.hardware import Device
from nxd_memopt.planner.search.fixed_options import FixedOptions
from nxd_memopt.planner.search.problem import Setting
from nxd_memopt.training.config.lora import LoraOptions
from nxd_memopt.training.config.moe import MoEOptions, completed_options
from nxd_memopt.training.config.precision import resolve_precision
from nxd_memopt.training.config.train_config import RECIPES, TrainConfig

STATIC_BLOCK = 128
"""Rows of a block of an expert that are planned for Trainium where no static form is given."""


@dataclass(frozen=True)
class ModelSource:
    """A model, and the run of a YAML if one is named.

    Args:
        options: section -> all of its options, of a YAML with their defaults.
        given: section -> options that are not defaults, as values of YAML.
        fixed: options that the search for settings keeps.
        tensor_model_parallel_size: T; None if the search chooses it.
        is_run: whether a YAML is named.
    """

    options: Mapping[str, Mapping[str, Any]]
    given: Mapping[str, dict[str, Any]]
    fixed: FixedOptions = field(default_factory=FixedOptions)
    tensor_model_parallel_size: int | None = None
    is_run: bool = False

    @property
    def given_moe(self) -> dict[str, Any]:
        """Options of the ``moe`` section that are set."""
        return {name: value for name, value in self.options.get("moe", {}).items() if value is not None}

    @property
    def lora(self) -> LoraOptions:
        """Options of the ``lora`` section; a model alone has none."""
        return LoraOptions(**self.options.get("lora", {}))

    def model_config(self) -> dict[str, Any]:
        """Return the model's complete config, with the experts that the ``moe`` section adds."""
        section = self.options["model"]
        config = dict(section.get("config_overrides") or {})
        if self.is_run:
            require_known_keys("model.config_overrides", config)
        if section.get("pretrained"):
            config = load_model_config(section["pretrained"], ()) | config
        config = with_experts(with_defaults(config), self.given_moe)
        require_sizes(config)
        require_supported_values(config, "its config.json")
        return config


def read_source(name: str) -> ModelSource:
    """Return the model, or the run.

    Args:
        name: a known model, a config.json, its directory, a recipe, or a YAML file.

    Raises:
        ValueError: there is no such model, or the file has no model.
    """
    path = Path(name)
    recipe = RECIPES / f"{name}.yaml"
    if name not in NAMED_CONFIGS and path.suffix in (".yaml", ".yml"):
        return _run(path, _stated_parallel_options(path))
    # The sizes of a recipe are of the devices that it was written for.
    if name not in NAMED_CONFIGS and recipe.is_file() and not path.exists():
        return _run(recipe, ())
    if name not in NAMED_CONFIGS and not path.exists():
        # A name of the Hugging Face Hub, or a file that is not there.
        if len(path.parts) > 1 or path.suffix:
            raise ValueError(
                f"--model {name} does not exist: of a model of the Hugging Face Hub the config.json "
                "is enough: hf download ORGANIZATION/MODEL config.json --local-dir DIRECTORY, then --model DIRECTORY"
            )
        names = (*NAMED_CONFIGS, *sorted(file.stem for file in RECIPES.glob("*.yaml")))
        require_one_of("model", name, names)
    config = load_model_config(name, ())
    section: dict[str, Any] = {"config_overrides": config}
    # A directory may have weights and tokenizer too, which the training program then uses.
    if path.is_dir():
        section = {"pretrained": str(path.resolve())}
    return ModelSource({"model": {"config_overrides": config}}, {"model": section})


def _run(path: Path, stated: Collection[str]) -> ModelSource:
    """Return the run of a YAML, of whose ``parallel`` section the options ``stated`` are fixed."""
    # Here and not above: only a YAML needs the packages that read command lines and YAML.
    from nxd_memopt.training.config.parsing import read_yaml

    # As the training program reads it: names of NeMo, and an error for what it does not know.
    config = read_yaml(path)
    if config.model.pretrained is None and not config.model.config_overrides:
        raise ValueError(
            f"{path} has no section model, which nxd-memopt train gets as --model.pretrained: pass the model's "
            "directory as --model, or a YAML with model.pretrained"
        )
    model, optimizer = config.model, config.optimizer
    precision, _, _ = resolve_precision(config.trainer.precision, model.dtype, optimizer.master_weights)
    options = {name: vars(getattr(config, name)) for name in ("model", "data", "data_parallel", "moe", "lora")}
    parallel = config.parallel
    return ModelSource(
        options | {"trainer": {"precision": precision}},
        {section.name: given_options(getattr(config, section.name)) for section in dataclasses.fields(config)},
        _fixed_options(config, stated),
        parallel.tensor_model_parallel_size if "tensor_model_parallel_size" in stated else None,
        is_run=True,
    )


def _stated_parallel_options(path: Path) -> set[str]:
    """Return the options of the ``parallel`` section that a YAML states, also those that equal the defaults."""
    from nxd_memopt.training.config.nemo.model import translate
    from nxd_memopt.training.config.parsing import ALIASES
    from nxd_memopt.training.config.yaml_file import read_yaml_file

    content = read_yaml_file(path)
    # What is no configuration is an error of ``read_yaml``.
    sections = translate(content, []).values() if isinstance(content, Mapping) else ()
    names = {str(name) for section in sections if isinstance(section, Mapping) for name in section}
    known = {option.name for option in dataclasses.fields(ParallelConfig)}
    return {ALIASES.get(name, ("", name))[1] for name in names} & known


def _fixed_options(config: TrainConfig, stated: Collection[str]) -> FixedOptions:
    """Return the options of a run that the search does not choose.

    ``memory_plan.setting_of`` has the same options of a run that starts; ``tests/planner/test_plan_of_a_run.py``
    compares the figures.
    """
    parallel, memory, optimizer = config.parallel, config.memory, config.optimizer
    # Checked here, because the search counts with the number of instances.
    sharding = dataclasses.replace(config.data_parallel)
    setting = Setting(
        memory=MemoryConfig(
            attention_backend=memory.attention_backend, fused_linear_cross_entropy=memory.fused_linear_cross_entropy
        ),
        # The default, False, is that of a run without tensor parallelism.
        sequence_parallel_enabled=parallel.sequence_parallel_enabled if "sequence_parallel_enabled" in stated else None,
        reduce_dtype=parallel.reduce_dtype,
        optimizer_staging_gib=optimizer.optimizer_staging_gib,
        optimizer_in_backward=optimizer.in_backward,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        reshard_after_forward=sharding.reshard_after_forward,
    )
    return FixedOptions(
        setting,
        expert_model_parallel_size=(
            parallel.expert_model_parallel_size if "expert_model_parallel_size" in stated else None
        ),
        optimizer_instances=sharding.num_distributed_optimizer_instances,
        compiles_layers=config.trainer.compile is not None,
    )


def given_options(section: Any) -> dict[str, Any]:
    """Return the options of a section that are not defaults, as values of YAML."""
    given: dict[str, Any] = {}
    for option in dataclasses.fields(section):
        value = getattr(section, option.name)
        factory = option.default_factory
        default = option.default if factory is dataclasses.MISSING else factory()
        if value != default:
            given[option.name] = _plain(value)
    return given


def _plain(value: Any) -> Any:
    """Return ``value`` with lists, dicts and texts in place of tuples, dataclasses and paths."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def planned_moe(source: ModelSource, config: Mapping[str, Any], device: Device) -> MoEConfig | None:
    """Return the options of the layers with experts; None for a dense model.

    Args:
        source: the model, or the run.
        config: of the model.
        device: Trainium, whose graphs need a static form, gets blocks of ``STATIC_BLOCK`` rows without one.

    Raises:
        ValueError: the section is for experts that the model does not have, or chooses a memory technique.
    """
    given = source.given_moe
    if not any(moe_layers(config)):
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"moe.{name} {value!r} needs a model with experts: leave it out, or set moe.num_moe_experts"
            )
        return None
    if given.get("moe_layer_recompute"):
        raise ValueError("moe.moe_layer_recompute True is a technique, which plan chooses itself: leave it out")
    moe = completed_options(MoEOptions(**given), config)
    if device.kind != "neuron" or moe.moe_expert_block_size is not None or moe.moe_pad_expert_input_to_capacity:
        return moe
    if moe.moe_expert_capacity_factor is not None:
        raise ValueError(
            f"moe.moe_expert_capacity_factor {moe.moe_expert_capacity_factor} alone has shapes that depend on the "
            f"routing, and {device.name} compiles fixed ones: set moe.moe_pad_expert_input_to_capacity to true"
        )
    static = {"moe_expert_block_size": STATIC_BLOCK, "moe_token_dispatcher_type": "allgather"}
    return completed_options(MoEOptions(**(given | static)), config)
