"""How much host memory processes can still allocate, and whether a host's ranks fit it together."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FILES = ("memory.max", "memory.current", "inactive_file")
"""Limit and use of a cgroup, and the statistic of its page cache."""
_FILES_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def require_host_memory(required: int, owner: str) -> None:
    """Raise ``ValueError`` on every rank unless each host has what its ranks require together.

    Every rank calls, before any of them allocates: each would find the same memory of its host free.

    Args:
        required: bytes that this rank is about to allocate.
        owner: what they are for, for the message.
    """
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.is_file() else ""
    host = f"{platform.node()} {boot}"
    texts = share_texts(json.dumps([parallel_state.get_global_rank(), host, required, available_host_bytes()]))
    # By rank, because the one process of a simulated world reads its own text as that of every rank.
    asked = {rank: (name, size, available) for rank, name, size, available in map(json.loads, texts)}
    for name in sorted({name for name, _, _ in asked.values()}):
        sizes = [size for other, size, _ in asked.values() if other == name]
        known = [available for other, _, available in asked.values() if other == name and available is not None]
        if known and sum(sizes) > min(known):
            ranks = f" of the {len(sizes)} ranks of {name.split()[0]}" if len(sizes) > 1 else ""
            raise ValueError(
                f"{owner}{ranks} requires {sum(sizes)} bytes of host memory, and {min(known)} are available: "
                "use a host with more memory, or turn off what requires it"
            )


def available_host_bytes() -> int | None:
    """Return the bytes that processes in this container or job can still allocate, or None if the system
    does not report it.

    Linux reports the host's memory in /proc/meminfo, and the limits of a container or of a scheduler's job in cgroups.
    """
    if not _MEMINFO.is_file():
        return None
    # Lines are "MemAvailable:   12345 kB", in KiB.
    lines = _MEMINFO.read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) << 10
    return min([available, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes that the process's cgroups, and those around them, leave of their limits."""
    lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines() if _OWN_CGROUPS.is_file() else ["0::/"]
    for line in lines:
        # Version 2 has one line, 0::/path, version 1 one for each group of controllers.
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (_CGROUP / "memory", _FILES_OF_VERSION_1) if controllers else (_CGROUP, _FILES)
        # Inside a container the path may be the host's, of which no directory is mounted here: the root is
        # then the container's own. A job of Slurm has limits in directories between the root and its own.
        names = Path(path).parts[1:]
        for depth in range(len(names) + 1):
            left = _left_in(root.joinpath(*names[:depth]), *files)
            if left is not None:
                yield left


def _left_in(directory: Path, limit_file: str, used_file: str, cache: str) -> int | None:
    """Return the bytes that a cgroup leaves of its limit, or None if it has none."""
    limit = _read_number(directory / limit_file)
    used = _read_number(directory / used_file)
    if limit is None or used is None:
        return None
    # The cgroup counts the page cache as used, but the kernel reclaims inactive file pages on demand.
    inactive = 0
    statistics = directory / "memory.stat"
    for line in statistics.read_text(encoding="utf-8").splitlines() if statistics.is_file() else ():
        if line.startswith(f"{cache} "):
            inactive = int(line.split()[1])
    return limit - used + inactive


def _read_number(path: Path) -> int | None:
    """Return the number in a cgroup file, or None for ``max`` and for a missing file."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8").strip()
    if text == "max":
        return None
    return int(text)
