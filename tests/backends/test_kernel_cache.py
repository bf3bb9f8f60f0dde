"""Where compiled kernels are kept: one directory, unless the user has set the packages' own variables."""

from __future__ import annotations

import fcntl
import os

import pytest

from nxd_memopt.backends.cuda.kernel_cache import FLASH4, FLASH4_SWITCH, TRITON, keep_kernels


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for name in (TRITON, FLASH4, FLASH4_SWITCH):
        # Set first, so that what the function sets is removed after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nxd_memopt" / "kernels"


def test_both_packages_keep_their_kernels_in_one_directory(cache):
    line = keep_kernels()
    assert line == keep_kernels() == f"kept for later starts in {cache}"
    assert {name: os.environ[name] for name in (TRITON, FLASH4, FLASH4_SWITCH)} == {
        TRITON: str(cache / "triton"),
        FLASH4: str(cache / "flash4"),
        FLASH4_SWITCH: "1",
    }


def test_the_users_variables_win(cache, monkeypatch):
    monkeypatch.setenv(TRITON, "/elsewhere")
    assert keep_kernels() == f"kept for later starts in /elsewhere and {cache / 'flash4'}"
    monkeypatch.setenv(FLASH4_SWITCH, "0")
    assert "FlashAttention-4's not" in keep_kernels() and os.environ[FLASH4_SWITCH] == "0"


def test_nothing_is_kept_on_a_file_system_without_locks(cache, monkeypatch):
    """FlashAttention-4 would end the process after it has waited for a lock."""

    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "not kept for later starts" in keep_kernels() and "no locks available" in keep_kernels()
    assert not {TRITON, FLASH4, FLASH4_SWITCH} & os.environ.keys()
    # A lock that another rank holds is none of these.
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(BlockingIOError()))
    assert keep_kernels() == f"kept for later starts in {cache}"
