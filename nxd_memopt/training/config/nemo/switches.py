"""Translates switches of NeMo and Megatron that repeat what another option says."""

from __future__ import annotations

from typing import Any

Sections = dict[str, dict[str, Any]]

# Switch -> section, option that says the same here, and its value if the switch is true and the option is not given.
SWITCHES: dict[str, tuple[str, str, Any]] = {
    "cpu_offloading": ("memory", "cpu_offloading_num_layers", None),
    "optimizer_cpu_offload": ("optimizer", "optimizer_offload_fraction", 1.0),
    "moe_router_enable_expert_bias": ("moe", "moe_router_bias_update_rate", 1e-3),
    "moe_token_dropping": ("moe", "moe_expert_capacity_factor", None),
}
# Further options that a switch turns off.
TURNED_OFF = {"cpu_offloading": ("cpu_offloading_activations", "cpu_offloading_weights")}
# Options that config.json has.
OF_THE_MODEL = ("moe_ffn_hidden_size", "moe_layer_freq", "moe_router_pre_softmax", "moe_shared_expert_gate")
REPLACED = {"moe_layer_recompute": "memory.recompute_granularity: selective, memory.recompute_modules: [moe]"}


def knows(name: str) -> bool:
    """Return whether ``name`` is a switch or another option that ``take_switches`` reads."""
    return name in SWITCHES or name in OF_THE_MODEL or name in REPLACED


def take_switches(sections: Sections, switches: dict[str, Any], problems: list[str]) -> None:
    """Set the options that switches stand for.

    Args:
        sections: options by section, under this library's names.
        switches: values of the options that ``knows`` knows.
        problems: gets a text for each switch that contradicts an option, or has no counterpart.
    """
    for name, value in switches.items():
        if name in SWITCHES:
            problem = _take(sections, name, value)
        elif name in REPLACED and value:
            problem = f"{name} {value!r} is not supported: write {REPLACED[name]}"
        elif name in OF_THE_MODEL and value is not None:
            problem = f"{name} {value!r} is an option of the model, which config.json has: leave it out"
        else:
            continue
        if problem is not None:
            problems.append(problem)


def _take(sections: Sections, name: str, value: Any) -> str | None:
    """Set the option of one switch; return what is wrong with it, or None."""
    section, option, default = SWITCHES[name]
    options = sections.setdefault(section, {})
    if value not in (True, False, None):
        return f"{name} must be true or false, got {value!r}"
    if value is None:
        return None
    if not value:
        # Megatron ignores the numbers of what is turned off.
        for each in (option, *TURNED_OFF.get(name, ())):
            options.pop(each, None)
        return None
    if options.get(option):
        return None
    # Without a number of layers this library offloads the inputs of all recomputed layers.
    if any(options.get(each) for each in TURNED_OFF.get(name, ())):
        return None
    if default is None:
        return f"{name} is true, and {section}.{option} is not given: set it"
    options[option] = default
    return None
