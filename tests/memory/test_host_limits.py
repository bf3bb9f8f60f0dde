"""Memory that a host, its containers and a scheduler's jobs leave, and ranks that need it together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from nxd_memopt.memory import host_limits
from nxd_memopt.memory.host_limits import available_host_bytes, require_host_memory
from tests.dist.pool import distributed
from tests.reference import error_message


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Return the directory of cgroups of a host with 1 MiB."""
    (tmp_path / "meminfo").write_text("MemTotal:  2048 kB\nMemAvailable:  1024 kB\n")
    monkeypatch.setattr(host_limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_limits, "_OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_limits, "_CGROUP", tmp_path / "root")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def limit(directory: Path, limit_bytes: object, used: int, inactive: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit_bytes}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"active_file 7\ninactive_file {inactive}\n")


def test_available_memory_is_that_of_the_host_or_of_the_container(root, monkeypatch):
    assert available_host_bytes() == 1 << 20
    limit(root, "max", 5000, 300)
    assert available_host_bytes() == 1 << 20
    limit(root, 9000, 5000, 300)
    assert available_host_bytes() == 9000 - 5000 + 300  # the page cache is given up on demand
    monkeypatch.setattr(host_limits, "_MEMINFO", root / "absent")
    assert available_host_bytes() is None


def test_a_job_has_the_lowest_limit_on_its_way_to_the_root(root):
    """A job of Slurm has its own directory, and no namespace of cgroups."""
    (root.parent / "cgroup").write_text("0::/system.slice/job_7/step_0\n")
    limit(root / "system.slice", "max", 5000, 0)
    limit(root / "system.slice" / "job_7", 8000, 1000, 20)
    assert available_host_bytes() == 8000 - 1000 + 20
    limit(root / "system.slice" / "job_7" / "step_0", 6000, 500, 0)
    assert available_host_bytes() == 5500
    # A container that sees the path of its host, whose directory is not mounted.
    (root.parent / "cgroup").write_text("0::/docker/1234\n")
    limit(root, 3000, 100, 0)
    assert available_host_bytes() == 2900


def test_the_limits_of_the_first_version_of_cgroups_count(root):
    (root.parent / "cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    directory = root / "memory" / "job"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text("7000\n")
    (directory / "memory.usage_in_bytes").write_text("6000\n")
    assert available_host_bytes() == 1000
    (directory / "memory.stat").write_text("inactive_file 9\ntotal_inactive_file 50\n")
    assert available_host_bytes() == 1050


def test_one_process_is_told_what_it_requires(monkeypatch):
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: 1000)
    require_host_memory(1000, "checkpoint")
    message = error_message(lambda: require_host_memory(1001, "checkpoint"))
    assert "checkpoint requires 1001 bytes of host memory, and 1000 are available" in message
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: None)
    require_host_memory(1 << 60, "checkpoint")


@pytest.mark.slow
@distributed(world_size=3)
def test_the_ranks_of_a_host_share_its_memory_also_unequal_parts():
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_limits, "available_host_bytes", lambda: 1000)
        require_host_memory((900, 0, 100)[rank], "checkpoint")
        message = error_message(lambda: require_host_memory((900, 1, 100)[rank], "checkpoint"))
        assert message.startswith("checkpoint of the 3 ranks of ")
        assert "requires 1001 bytes of host memory, and 1000 are available" in message
        # Ranks of other hosts have other memory.
        patch.setattr(host_limits.platform, "node", lambda: f"host{rank}")
        require_host_memory(900, "checkpoint")
