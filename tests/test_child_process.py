"""Programs that end with the one that has started them, and signals that reach them first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nxd_memopt.child_process import run_child

PARENT = """
import os, sys
from nxd_memopt.child_process import run_child
done = run_child([sys.executable, "-c", sys.argv[1]], os.environ)
print("status", done.returncode, flush=True)
"""
READY = "print(os.getpid(), flush=True); signal.pause()"
SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
"""


def start(program: str) -> tuple[subprocess.Popen[str], int]:
    """Start PARENT with ``program``; return it and the child's process id, when the child is ready."""
    command = [sys.executable, "-c", PARENT, program + READY]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def ends(process_id: int) -> bool:
    """Whether a process ends within a minute; a zombie has ended."""
    status = Path(f"/proc/{process_id}/status")
    for _ in range(600):
        try:
            if "\nState:\tZ" in status.read_text():
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_saves_is_waited_for(number: signal.Signals) -> None:
    parent, _ = start(SAVES)
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=60)
    assert output == f"saved\nstatus {128 + number}\n" and parent.returncode == 0


def test_a_signal_that_ends_the_program_ends_both() -> None:
    parent, child = start("import os, signal; ")
    parent.send_signal(signal.SIGTERM)
    output, _ = parent.communicate(timeout=60)
    assert output == "" and parent.returncode == 128 + signal.SIGTERM
    assert ends(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a signal for the death of a parent")
def test_a_program_ends_with_a_killed_parent() -> None:
    parent, child = start("import os, signal; ")
    parent.kill()
    parent.communicate(timeout=60)  # the child has the other end of the pipe too
    assert ends(child)


def test_what_it_prints() -> None:
    command = [sys.executable, "-c", "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"]
    done = run_child(command, os.environ, capture_output=True)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "2\n", 3)
    with pytest.raises(OSError):
        run_child(["/"], os.environ)
