"""Identifies a process of this or another host, and finds out whether it still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class Process:
    """What distinguishes a process from every other one, also after a restart of its host.

    Fields that the operating system does not tell are empty.

    Args:
        host: host name.
        machine: machine id of the host's installation.
        boot: id of the kernel's boot; containers of one host share it.
        pid_namespace: name of the space of process ids, which a container has of its own.
        pid: process id.
        started: start time of the process, in clock ticks since the boot. A process id is used
            again after its process has ended, with another start time.
    """

    host: str
    machine: str
    boot: str
    pid_namespace: str
    pid: int
    started: str


def this_process() -> Process:
    """Return the identity of the calling process."""
    namespace = ""
    if (PROC / "self/ns/pid").is_symlink():
        namespace = str((PROC / "self/ns/pid").readlink())
    return Process(
        host=socket.gethostname(),
        machine=_first_line(MACHINE_ID),
        boot=_first_line(PROC / "sys/kernel/random/boot_id"),
        pid_namespace=namespace,
        pid=os.getpid(),
        started=start_ticks(os.getpid()) or "",
    )


def start_ticks(pid: int) -> str | None:
    """Return the start time of a process of this host in clock ticks since the boot.

    Returns None if there is no such process, or if it has ended and its parent has not read its
    exit status yet.
    """
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # "pid (name) state ppid ...": the name may contain spaces and parentheses. The start time is
    # field 22, that is number 20 of the fields from the state on (proc_pid_stat(5)).
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return fields[19]


def is_running(process: Process) -> bool:
    """Return whether a process of this host and this space of process ids still runs."""
    if PROC.is_dir():
        return start_ticks(process.pid) == process.started
    # Without /proc another process with the same id counts as running: a lock may then need to be
    # removed by hand, but a run never loses its lock.
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _first_line(path: Path) -> str:
    """Return the first line of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
