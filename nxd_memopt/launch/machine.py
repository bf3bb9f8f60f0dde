"""What the launcher asks of the host it runs on: the network interface, Trainium chips, the limit of open files."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

OPEN_FILES = 65535  # what AWS's launchers set: every rank has sockets to others, and each worker process opens files
CONTAINER_INTERFACE = "eth0"
_ROUTE_IS_UP = 0x1


@dataclass(frozen=True)
class Machine:
    """This host.

    Args:
        root: of the file system; tests pass another tree.
        soft_limit: open files of one process, which the process may raise; -1 is no limit.
        hard_limit: up to which.
    """

    root: Path
    soft_limit: int
    hard_limit: int

    @classmethod
    def here(cls) -> Machine:
        return cls(Path("/"), *resource.getrlimit(resource.RLIMIT_NOFILE))

    def container_interface(self) -> str | None:
        """Return ``eth0`` where the host has it and reaches other networks through it, and ``None`` elsewhere.

        That is so in containers and on Amazon Linux 2. Ubuntu's interfaces on EC2 are ``ens5`` and alike.
        """
        if not (self.root / "sys/class/net" / CONTAINER_INTERFACE).exists():
            return None
        return CONTAINER_INTERFACE if self._default_interface() == CONTAINER_INTERFACE else None

    def _default_interface(self) -> str | None:
        """Return the interface of the IPv4 default route with the lowest metric, from Linux's routing table."""
        table = self.root / "proc/net/route"
        if not table.exists():
            return None
        routes: list[tuple[int, str]] = []
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            # Iface Destination Gateway Flags RefCnt Use Metric Mask ...; addresses and flags in hexadecimal
            fields = line.split()
            is_default = len(fields) > 7 and int(fields[1], 16) == 0 and int(fields[7], 16) == 0
            if is_default and int(fields[3], 16) & _ROUTE_IS_UP:
                routes.append((int(fields[6]), fields[0]))
        return min(routes)[1] if routes else None

    def chips(self) -> int:
        """Return how many Trainium chips there are: the driver makes one ``/dev/neuron<n>`` for each."""
        devices = self.root / "dev"
        names = [path.name for path in devices.iterdir()] if devices.is_dir() else []
        return sum(re.fullmatch(r"neuron\d+", name) is not None for name in names)

    def raised_open_files(self) -> int | None:
        """Return the soft limit to set, as near to ``OPEN_FILES`` as the hard limit allows; ``None`` to leave it."""
        wanted = OPEN_FILES if self.hard_limit == resource.RLIM_INFINITY else min(OPEN_FILES, self.hard_limit)
        return wanted if self.soft_limit != resource.RLIM_INFINITY and self.soft_limit < wanted else None


def set_open_files(limit: int) -> None:
    """Set the soft limit of open files of this process, which the programs that it starts inherit."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
