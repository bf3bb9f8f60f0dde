"""Keeps compiled kernels on disk, Triton's and FlashAttention-4's, so that later processes load them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TRITON = "TRITON_CACHE_DIR"
FLASH4 = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
FLASH4_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def keep_kernels() -> str:
    """Set the packages' environment variables, except those that are set; return where kernels are kept, in words.

    Triton keeps kernels by itself, in another directory; FlashAttention-4 only if asked to, and compiles in each
    process otherwise. Both look up kernels by their source, their versions and the GPU. Call it before
    the packages are imported.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nxd_memopt" / "kernels"
    refusal = _refusal(directory)
    if refusal is not None:
        return f"not kept for later starts: {refusal}; set XDG_CACHE_HOME to another directory"
    os.environ.setdefault(TRITON, str(directory / "triton"))
    os.environ.setdefault(FLASH4, str(directory / "flash4"))
    os.environ.setdefault(FLASH4_SWITCH, "1")
    if os.environ[FLASH4_SWITCH] != "1":
        return f"Triton's are kept for later starts in {os.environ[TRITON]}, FlashAttention-4's not ({FLASH4_SWITCH})"
    places = sorted({os.environ[TRITON], os.environ[FLASH4]})
    if all(Path(place).parent == directory for place in places):
        places = [str(directory)]
    return f"kept for later starts in {' and '.join(places)}"


def _refusal(directory: Path) -> str | None:
    """Return why the directory cannot have kernels, or None if it can."""
    # FlashAttention-4 ends the process if it cannot lock a file for 15 seconds, as on a network file system
    # without locks.
    try:
        import fcntl

        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as file, suppress(BlockingIOError):  # another rank has it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ImportError) as error:
        return f"{directory} cannot be written and locked ({error})"
    return None
