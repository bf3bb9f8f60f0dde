"""The command ``nxd-memopt plan``: which settings fit a device and how fast they are, without the device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_memopt._optional import require_installed
from nxd_memopt.config import require_one_of
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.planner.architectures import moe_layers
from nxd_memopt.planner.explain import explanation
from nxd_memopt.planner.hardware import DEVICES, GIB, ONLY_HARDWARE_SHOWS, Device, device_named
from nxd_memopt.planner.model_configs import NAMED_CONFIGS, load_model_config, with_defaults, with_experts
from nxd_memopt.planner.moe_sizes import BALANCED_ROUTING
from nxd_memopt.planner.plan import Plan, plans, remedies, smallest
from nxd_memopt.planner.problem import PRECISIONS, Problem, Setting
from nxd_memopt.planner.step_time import rates_of
from nxd_memopt.training.config import OptimizerConfig, TrainConfig
from nxd_memopt.training.lora_options import LoraOptions
from nxd_memopt.training.moe_options import MoEOptions, completed_options
from nxd_memopt.training.precision import resolve_precision

STATIC_BLOCK = 128
"""Rows of a block of an expert that are planned for Trainium where no static form is given."""
RECIPES = Path(__file__).parent / "training" / "recipes"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0, or 1 if no setting fits.

    Raises:
        ValueError: the arguments, the model or the file to be written are not valid.
    """
    # Of the machine that it runs on, and so the one part that imports torch.
    if list(arguments[:1]) == ["--calibrate"]:
        return _calibrate(arguments[1:])
    options = _parse(arguments)
    source, sections = _model(options.model)
    problem = _problem(options, source)
    found = plans(problem)
    if options.json:
        print(json.dumps(_document(problem, found[: options.show]), indent=1))
    else:
        _print(options, problem, found)
    if options.plot is not None:
        # Where nothing fits, the setting that exceeds the memory least.
        _draw(options, problem, found[: options.show] or [smallest(problem)])
    if not found:
        return 1
    if options.explain and not options.json:
        print()
        for line in explanation(found[0].memory, found[0].time):
            print(line)
    if options.write is not None:
        sections |= {"moe": _moe_section(source, problem), "lora": _given_lora(source)}
        write_yaml(Path(options.write), problem, found[0], sections)
        print(f"wrote {options.write}: nxd-memopt train --config {options.write}", file=sys.stderr)
    return 0


def _calibrate(arguments: Sequence[str]) -> int:
    """Measure this machine and write its rates; under torchrun also those of its collectives."""
    if len(arguments) != 1 or not arguments[0].endswith(".json"):
        raise ValueError("--calibrate takes the .json file to write and nothing else: plan --calibrate FILE.json")
    from nxd_memopt.backends import backend
    from nxd_memopt.parallel_layers import parallel_state
    from nxd_memopt.parallel_layers.utils import leave_process_groups
    from nxd_memopt.profiling.calibration import measure_device, write_device
    from nxd_memopt.training.distributed import is_rank_zero, world_size

    backend.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size())
    device, found = measure_device()
    if is_rank_zero():
        write_device(Path(arguments[0]), device, found)
        rates = ", ".join(f"{dtype} {flops / 1e12:.3g}" for dtype, flops in device.matmul_flops.items())
        print(f"matmuls in TFLOP/s: {rates}; memory: {device.memory_bytes_per_s / 1e9:.4g} GB/s")
        print(f"wrote {arguments[0]}: nxd-memopt plan --device {arguments[0]} --model NAME")
    leave_process_groups()
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are the command's: one line, exit status 2."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; nxd-memopt plan --help shows the options")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = _Parser(
        prog="nxd-memopt plan",
        description="Show which settings of a training run fit a device, and how fast they are. No hardware is needed.",
    )
    models = ", ".join(NAMED_CONFIGS)
    parser.add_argument("--model", required=True, help=f"{models}; a config.json or its directory; a recipe or YAML")
    devices = f"{', '.join(DEVICES)}; a FILE.json of nxd-memopt plan --calibrate FILE.json, run on the machine"
    parser.add_argument("--device", required=True, help=devices)
    parser.add_argument("--devices", type=int, help="number of ranks; default: those of one host")
    parser.add_argument("--tensor-model-parallel-size", type=int, metavar="T", help="T; default: all sizes are tried")
    parser.add_argument("--seq-length", type=int, help="tokens per sequence; default: the YAML's or the model's")
    parser.add_argument("--global-batch", type=int, help="sequences per optimizer step; default: one per rank")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), help="default: bf16-mixed, fp32 master weights")
    parser.add_argument("--isolate-documents", action="store_true", help="documents do not attend to each other")
    parser.add_argument("--device-memory-gib", type=float, help="instead of the device's")
    parser.add_argument("--host-memory-gib", type=float, help="host memory of one rank, instead of the device's")
    parser.add_argument("--show", type=int, default=10, help="number of settings to show")
    parser.add_argument("--explain", action="store_true", help="show each term of the fastest setting with its formula")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--write", metavar="FILE", help="write the fastest setting as YAML for nxd-memopt train --config"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the memory of the shown settings by term as a .png file")
    options = parser.parse_args(list(arguments))
    if options.plot is not None and not options.plot.endswith(".png"):
        raise ValueError(f"--plot {options.plot} is not a .png file: name one")
    if options.show < 1:
        raise ValueError(f"--show must be at least 1, got {options.show}")
    return options


def _model(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a configuration file's content, or that of a model alone, and the sections to write to a YAML.

    Args:
        name: a known model, a config.json, its directory, a recipe, or a YAML file.

    Raises:
        ValueError: there is no such model, or the file has no model.
    """
    path = Path(name)
    recipe = RECIPES / f"{name}.yaml"
    if name not in NAMED_CONFIGS and (path.suffix in (".yaml", ".yml") or (recipe.is_file() and not path.exists())):
        return _run(path if path.suffix else recipe)
    if name not in NAMED_CONFIGS and not path.exists():
        # A name of the Hugging Face Hub, or a file that is not there.
        if len(path.parts) > 1 or path.suffix:
            raise ValueError(
                f"--model {name} is no file and no directory here: of a model of the Hugging Face Hub the config.json "
                "is enough: hf download ORGANIZATION/MODEL config.json --local-dir DIRECTORY, then --model DIRECTORY"
            )
        names = (*NAMED_CONFIGS, *sorted(file.stem for file in RECIPES.glob("*.yaml")))
        require_one_of("model", name, names)
    config = load_model_config(name, ())
    section: dict[str, Any] = {"config_overrides": config}
    # A directory may have weights and tokenizer too, which the training program then uses.
    if path.is_dir():
        section = {"pretrained": str(path.resolve())}
    return {"model": {"config_overrides": config}}, {"model": section}


def _run(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what a run of a YAML has, defaults included, and its sections without them; see ``_model``."""
    # Here and not above: only a YAML needs the packages that read command lines and YAML.
    from nxd_memopt.training.arguments import read_yaml

    # As the training program reads it: names of NeMo, and an error for what it does not know.
    config = read_yaml(path)
    if config.model.pretrained is None and not config.model.config_overrides:
        raise ValueError(f"{path} has no section model: pass a configuration of nxd-memopt train")
    model, optimizer = config.model, config.optimizer
    precision, _, _ = resolve_precision(config.trainer.precision, model.dtype, optimizer.master_weights)
    source = {name: vars(getattr(config, name)) for name in ("model", "data", "data_parallel", "moe", "lora")}
    sections = {field.name: _given(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return source | {"trainer": {"precision": precision}}, sections


def _given(section: Any) -> dict[str, Any]:
    """Return the options of a section that are not defaults, as values of YAML."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if value != default:
            given[field.name] = _plain(value)
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


def _problem(options: argparse.Namespace, source: Mapping[str, Any]) -> Problem:
    """Return what is asked: the command's options before those of a configuration file."""
    device = device_named(options.device)
    section = source["model"]
    config = dict(section.get("config_overrides") or {})
    if section.get("pretrained"):
        config = load_model_config(section["pretrained"], ()) | config
    complete = with_experts(with_defaults(config), _given_moe(source))
    moe = _moe(source, complete, device)
    data = source.get("data") or {}
    trainer = source.get("trainer") or {}
    length = options.seq_length or data.get("seq_length") or complete.get("max_position_embeddings")
    if length is None:
        raise ValueError("--seq-length is missing, and the model has no max_position_embeddings: pass --seq-length")
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    stages = ("none", "zero1", "zero2", "zero3") if "data_parallel" in fields else ("none", "zero1")
    optimizer_fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    return Problem(
        config=complete,
        device=device,
        devices=device.ranks_per_host if options.devices is None else options.devices,
        sequence_length=length,
        global_batch_size=data.get("global_batch_size") if options.global_batch is None else options.global_batch,
        precision=options.precision or str(trainer.get("precision") or "bf16-mixed"),
        isolate_documents=options.isolate_documents or bool(data.get("isolate_documents", False)),
        stages=stages,
        offloads_optimizer="optimizer_cpu_offload" in optimizer_fields,
        grad_reduce_in_fp32=(source.get("data_parallel") or {}).get("grad_reduce_in_fp32") is not False,
        device_gib=options.device_memory_gib,
        host_gib=options.host_memory_gib,
        moe=moe,
        lora=_lora(source).config(),
        tensor_model_parallel_size=options.tensor_model_parallel_size,
    )


def _lora(source: Mapping[str, Any]) -> LoraOptions:
    """Return the options of the ``lora`` section; a model alone has none."""
    return LoraOptions(**(source.get("lora") or {}))


def _given_moe(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the ``moe`` section that are set."""
    return {name: value for name, value in (source.get("moe") or {}).items() if value is not None}


def _given_lora(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the ``lora`` section that are not defaults, as values of YAML."""
    return _given(_lora(source))


def _moe(source: Mapping[str, Any], config: Mapping[str, Any], device: Device) -> MoEConfig | None:
    """Return the options of the layers with experts; None for a dense model.

    Args:
        source: the configuration.
        config: of the model.
        device: Trainium, whose graphs need a static form, gets blocks of ``STATIC_BLOCK`` rows without one.

    Raises:
        ValueError: the section is for experts that the model does not have, or chooses a memory technique.
    """
    given = _given_moe(source)
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


def _moe_section(source: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """Return the ``moe`` section to write: what is given, and the static form that was planned for Trainium."""
    given = _given_moe(source)
    moe = problem.moe
    if moe is not None and moe.moe_expert_block_size is not None:
        names = ("moe_expert_block_size", "moe_token_dispatcher_type")
        return given | {name: getattr(moe, name) for name in names}
    return given


def _print(options: argparse.Namespace, problem: Problem, found: Sequence[Plan]) -> None:
    """Print the settings as a table, or what to change if there is none."""
    device = problem.device
    batch = problem.global_batch_size or "one sequence per rank"
    print(
        f"{options.model} on {problem.devices} x {device.name}, {problem.sequence_length:,} tokens, "
        f"global batch {batch}, {problem.precision}; {problem.usable_bytes / GIB:.1f} of "
        f"{problem.placed_device.memory_gib:g} GiB for tensors"
    )
    if not rates_of(device).is_calibrated:
        print(f"Times on {device.name} are not calibrated: they order the settings, no more. docs/planner.md")
    if ONLY_HARDWARE_SHOWS[device.kind]:
        print(f"Only hardware shows: {'; '.join(ONLY_HARDWARE_SHOWS[device.kind])}.")
    if any(plan.setting.expert_model_parallel_size > 1 for plan in found[: options.show]):
        print(f"With EP above 1 the figures are those of {BALANCED_ROUTING}.")
    if problem.moe is not None and problem.moe.moe_expert_block_size is not None:
        block = problem.moe.moe_expert_block_size
        print(f"Experts in blocks of {block} rows, of fixed shapes (moe.moe_expert_block_size).")
    if not found:
        closest = smallest(problem)
        print(
            f"Nothing fits. The smallest setting, {closest.setting.describe()}, needs "
            f"{closest.memory.device_bytes / GIB:.1f} GiB and {closest.memory.host_bytes / GIB:.1f} GiB of host "
            f"memory, of which a rank can use {problem.usable_host_bytes / GIB:.1f}."
        )
        changes = remedies(problem)
        print("\n".join(["Change one:", *(f"  {text}" for text in changes)]) if changes else "Use a larger device.")
        return
    print(f"{'tokens/s':>10}  {'step s':>7}  {'GiB':>6}  {'host':>5}  {'limit':<28} setting")
    for plan in found[: options.show]:
        print(
            f"{plan.tokens_per_s:>10,.0f}  {plan.time.step_s:>7.2f}  {plan.memory.device_bytes / GIB:>6.1f}  "
            f"{plan.memory.host_bytes / GIB:>5.1f}  {plan.time.limit:<28} {plan.setting.describe()}"
        )
    if len(found) > options.show:
        print(f"and {len(found) - options.show} slower ones: --show {len(found)}")
    best = found[0].memory
    terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in best.device.items() if size >= GIB // 100)
    print(f"Memory of the first, in GiB, at its peak ({best.moment}): {terms}")


def _draw(options: argparse.Namespace, problem: Problem, found: Sequence[Plan]) -> None:
    """Write the plot of ``--plot``."""
    require_installed("nxd-memopt plan --plot", "matplotlib", extra="train")
    from nxd_memopt.planner.plot import draw_plans

    title = f"{options.model} on {problem.devices} x {problem.device.name}, {problem.sequence_length:,} tokens"
    draw_plans(found, title, Path(options.plot))
    print(f"wrote {options.plot}", file=sys.stderr)


def _document(problem: Problem, found: Sequence[Plan]) -> dict[str, Any]:
    """Return all figures as values of JSON."""
    return {
        "device": problem.device.name,
        "devices": problem.devices,
        "sequence_length": problem.sequence_length,
        "global_batch_size": problem.global_batch_size,
        "precision": problem.precision,
        "usable_bytes": problem.usable_bytes,
        "usable_host_bytes": problem.usable_host_bytes,
        "only_hardware_shows": ONLY_HARDWARE_SHOWS[problem.device.kind],
        "remedies": [] if found else remedies(problem),
        "plans": [
            {
                "setting": dataclasses.asdict(plan.setting),
                "tokens_per_s": plan.tokens_per_s,
                "step_s": plan.time.step_s,
                "limit": plan.time.limit,
                "seconds": plan.time.terms,
                "peak": plan.memory.moment,
                "device_bytes": plan.memory.device,
                "host_bytes": plan.memory.host,
            }
            for plan in found
        ],
    }


def write_yaml(path: Path, problem: Problem, plan: Plan, sections: Mapping[str, dict[str, Any]]) -> None:
    """Write the setting as a configuration of the training program.

    Args:
        path: file that does not exist yet.
        problem: what the setting was chosen for.
        plan: the setting.
        sections: sections of the configuration; what the plan does not choose is written as it is.

    Raises:
        ValueError: the file exists.
    """
    import yaml

    if path.exists():
        raise ValueError(f"--write {path} exists already: name another file, or remove it")
    model = sections["model"]
    content = configuration(problem, plan.setting, model)
    for name, section in sections.items():
        kept = {option: value for option, value in section.items() if option not in _CHOSEN_OPTIONS}
        if name not in _CHOSEN_SECTIONS and kept:
            content[name] = kept | content.get(name, {})
    lines = [
        f"# Chosen by nxd-memopt plan for {problem.devices} x {problem.device.name}:",
        f"# {plan.setting.describe()}; {plan.memory.device_bytes / GIB:.1f} GiB, {plan.tokens_per_s:,.0f} tokens/s.",
    ]
    if "pretrained" not in model and "tokenizer" not in model:
        lines.append("# Add --model.tokenizer DIRECTORY, or set model.tokenizer here.")
    path.write_text("\n".join([*lines, yaml.safe_dump(content, sort_keys=False)]), encoding="utf-8")


_CHOSEN_SECTIONS = ("model", "memory", "data_parallel")
"""Sections of a configuration that the plan chooses or writes itself."""
_CHOSEN_OPTIONS = (
    "auto_memory",
    "enable_cuda_graph",
    "expert_model_parallel_size",
    "in_backward",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "optimizer_staging_gib",
    "optimizer_update_in_forward",
    "store_param_remainders",
    "zero1",
)
"""Options of other sections that the plan chooses: they are written if the chosen setting has them."""


def configuration(problem: Problem, setting: Setting, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration of the training program."""
    size = setting.tensor_model_parallel_size
    experts = setting.expert_model_parallel_size
    replicas = problem.devices // size
    defaults = {field.name: field.default for field in dataclasses.fields(setting.memory)}
    memory = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(setting.memory).items()
        if value != defaults[name]
    }
    optimizer: dict[str, Any] = {}
    content: dict[str, Any] = {
        "model": {key: value for key, value in model.items() if key != "dtype"},
        "parallel": {
            "tensor_model_parallel_size": size,
            "sequence_parallel_enabled": size > 1 and problem.sequence_length % size == 0,
            **({"expert_model_parallel_size": experts} if experts > 1 else {}),
        },
        "memory": memory,
        "data": {
            "seq_length": problem.sequence_length,
            "micro_batch_size": setting.micro_batch_size,
            "global_batch_size": problem.global_batch_size or setting.micro_batch_size * replicas,
            "isolate_documents": problem.isolate_documents,
        },
        "optimizer": optimizer,
        "trainer": {"precision": problem.precision},
    }
    if "data_parallel" in {field.name for field in dataclasses.fields(TrainConfig)}:
        data_parallel: dict[str, Any] = {"sharding": setting.sharding}
        if not setting.grad_reduce_in_fp32:
            data_parallel["grad_reduce_in_fp32"] = False
        content["data_parallel"] = data_parallel
    else:
        optimizer["zero1"] = setting.sharding == "zero1"
    if setting.optimizer_offload_fraction:
        optimizer["optimizer_cpu_offload"] = True
        optimizer["optimizer_offload_fraction"] = setting.optimizer_offload_fraction
        if setting.optimizer_update_in_forward:
            optimizer["optimizer_update_in_forward"] = True
        if setting.store_param_remainders:
            optimizer["store_param_remainders"] = True
    if problem.device.kind == "cuda":
        content["trainer"]["enable_cuda_graph"] = setting.cuda_graph
    return content
