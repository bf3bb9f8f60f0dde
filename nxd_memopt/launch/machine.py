"""Reads this host's network interface, number of Trainium chips and limit of open files."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

# The limit that AWS's launchers set: every rank has sockets to other ranks, and each worker
# process opens files.
OPEN_FILES = 65535
CONTAINER_INTERFACE = "eth0"
_ROUTE_IS_UP = 0x1


@dataclass(frozen=True)
class Machine:
    """Properties of this host.

    Args:
        root: root directory of the file system; tests pass another tree.
        soft_limit: maximum number of open files of a process; -1 is unlimited.
        hard_limit: maximum to which a process may raise its soft limit; -1 is unlimited.
    """

    root: Path
    soft_limit: int
    hard_limit: int

    @classmethod
    def here(cls) -> Machine:
        """Return the host that this process runs on."""
        return cls(Path("/"), *resource.getrlimit(resource.RLIMIT_NOFILE))

    def container_interface(self) -> str | None:
        """Return ``eth0`` if it exists and has the default route, or None otherwise.

        Containers and Amazon Linux 2 use ``eth0``. Ubuntu's interfaces on EC2 have names such as
        ``ens5``.
        """
        if not (self.root / "sys/class/net" / CONTAINER_INTERFACE).exists():
            return None
        return CONTAINER_INTERFACE if self._default_interface() == CONTAINER_INTERFACE else None

    def _default_interface(self) -> str | None:
        """Return the interface of the IPv4 default route with the lowest metric, or None."""
        table = self.root / "proc/net/route"
        if not table.exists():
            return None
        routes: list[tuple[int, str]] = []
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            # Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask ...
            # Addresses and flags are hexadecimal. The default route has destination and mask 0.
            fields = line.split()
            is_default = len(fields) > 7 and int(fields[1], 16) == 0 and int(fields[7], 16) == 0
            if is_default and int(fields[3], 16) & _ROUTE_IS_UP:
                routes.append((int(fields[6]), fields[0]))
        if not routes:
            return None
        _, interface = min(routes)
        return interface

    def chips(self) -> int:
        """Return the number of Trainium chips, which have one ``/dev/neuron<n>`` each."""
        devices = self.root / "dev"
        if not devices.is_dir():
            return 0
        # fullmatch: other devices and partial names may begin with "neuron" too.
        return sum(re.fullmatch(r"neuron\d+", path.name) is not None for path in devices.iterdir())

    def raised_open_files(self) -> int | None:
        """Return the soft limit to set, min(``OPEN_FILES``, hard limit), or None to keep it."""
        # RLIM_INFINITY is -1, so it must not be compared with other limits by < or min.
        target = OPEN_FILES
        if self.hard_limit != resource.RLIM_INFINITY:
            target = min(OPEN_FILES, self.hard_limit)
        if self.soft_limit == resource.RLIM_INFINITY or self.soft_limit >= target:
            return None
        return target
