"""Environment variables of the ranks with their reasons, merged with the present environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nxd_memopt.launch.hosts import Hosts
from nxd_memopt.launch.machine import Machine
from nxd_memopt.training.config.train_config import TrainConfig


@dataclass(frozen=True)
class Run:
    """Run that is about to be started: everything that a platform's variables depend on.

    Args:
        config: configuration of the training program.
        processes: ranks per host.
        hosts: hosts of the run.
        environ: present environment variables.
        machine: this host.
        root_comm_port: port on host 0 of the Neuron runtime's collectives; ``None`` leaves the
            choice to the framework.
    """

    config: TrainConfig
    processes: int
    hosts: Hosts
    environ: Mapping[str, str]
    machine: Machine
    root_comm_port: int | None = None


@dataclass(frozen=True)
class Variable:
    """Environment variable of the ranks.

    Args:
        name: name of the variable.
        value: value that the run needs, or its default.
        reason: why the variable is set, shown by ``--dry-run``.
        origin: ``default`` is overridden by a value in the environment; ``fixed`` follows from
            the configuration or the platform, and another value in the environment is an error;
            ``combined`` already contains the environment's value.
        versions: versions of the software that reads the variable; empty for all.
    """

    name: str
    value: str
    reason: str
    origin: Literal["default", "fixed", "combined"] = "default"
    versions: str = ""

    def comment(self) -> str:
        """Return the reason and the versions as one line of text."""
        if not self.versions:
            return self.reason
        return f"{self.reason} [{self.versions}]"


def merged(variables: list[Variable], environ: Mapping[str, str]) -> dict[str, str]:
    """Return values by name; a value in ``environ`` overrides the value of a ``default`` variable.

    Raises:
        ValueError: ``environ`` has another value for a ``fixed`` variable.
    """
    values = {}
    for variable in variables:
        value = variable.value
        # A combined variable was built from the environment's value, so it is not looked up
        # again: that would drop what the configuration added to it.
        if variable.origin != "combined":
            value = environ.get(variable.name, variable.value)
        # Overwriting the environment's value silently would hide that a shell profile or a module
        # file sets up another kind of run.
        if variable.origin == "fixed" and value != variable.value:
            raise ValueError(
                f"{variable.name} is {value!r} in the environment, but this run needs "
                f"{variable.value!r} ({variable.reason}): unset it, or change the configuration"
            )
        values[variable.name] = value
    return values
