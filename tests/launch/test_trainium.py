"""The launcher on Trainium: ranks and logical cores, the host's interface and limits, cache, ports, versions."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from nxd_memopt.command_line import INSTANCES, device_and_ranks
from nxd_memopt.launch import command, platforms
from nxd_memopt.launch.machine import Machine
from nxd_memopt.launch.platforms import PLATFORMS, Platform, platform_named
from tests.launch.launching import CORES, FOUR_HOSTS, ROOT, TOKENIZER, TRN1, TRN2, planned

# ---- trn1 ------------------------------------------------------------------------------------------------------------


def test_every_variable_is_documented() -> None:
    documented = (ROOT / "docs" / "trainium.md").read_text(encoding="utf-8")
    ports = ("--root-comm-port", "48620")
    for platform in ("trn1", "trn2"):
        for name in planned("llama3_8b", "--platform", platform, *ports, environ=FOUR_HOSTS).environment:
            assert f"`{name}`" in documented, name


# ---- trn2 and trn3 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "processes", "lnc"), [("trn2", 64, "2"), ("trn2-lnc1", 128, "1"), ("trn2-3xlarge", 4, "2")]
)
def test_ranks_and_logical_cores_of_trn2_agree(platform: str, processes: int, lnc: str) -> None:
    found = planned("llama3_8b_trn2", "--platform", platform)
    assert found.environment == TRN2 | {"NEURON_LOGICAL_NC_CONFIG": lnc}
    assert found.command[2:5] == ["nxd_memopt.launch.agent", "--nproc", str(processes)]
    assert processes * int(lnc) in (16 * 8, 8)  # 8 physical cores a chip, 16 chips to an instance, or one
    older = {"NEURON_RT_VIRTUAL_CORE_SIZE": lnc}
    assert planned("llama3_8b_trn2", "--platform", platform, environ=older).environment == found.environment | older


def test_trn3_has_four_ranks_for_each_chip_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("neuron0", "neuron1", "neuron12", "neuron3", "neuron_sysfs", "neuron", "null"):
        (tmp_path / "dev" / name).touch()
    found = planned("llama3_8b_trn2", "--platform", "trn3", machine=Machine(tmp_path, 1024, 65536))
    assert (found.world_size, found.environment) == (16, TRN2)
    assert planned("llama3_8b_trn2", "--platform", "trn3", "--nproc", "64").world_size == 64


@pytest.mark.parametrize(
    ("platform", "size", "noted"),
    [("trn2", 4, False), ("trn2", 8, True), ("trn2-lnc1", 8, False), ("trn1", 8, False)],
)
def test_tensor_parallel_groups_over_chips_are_advised_against(platform: str, size: int, noted: bool) -> None:
    arguments = ("--platform", platform, "--parallel.tensor-model-parallel-size", str(size))
    notes = planned("llama3_8b_trn2", *arguments).notes
    assert [f"tensor_model_parallel_size {size} spans chips" in note for note in notes] == [True] * noted


def test_certify_knows_every_platforms_device() -> None:
    trainium = {name for name, platform in PLATFORMS.items() if platform.is_trainium}
    # two physical cores share 24 GiB of HBM on Trainium2, 36 on Trainium3
    gib = {name: device_and_ranks(name)[0].memory_gib for name in trainium}
    assert gib == {"trn1": 16, "trn1-2xlarge": 16, "trn2": 24, "trn2-lnc1": 12, "trn2-3xlarge": 24, "trn3": 36}


# ---- the host --------------------------------------------------------------------------------------------------------

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
LOCAL = "{}\t00001FAC\t00000000\t0001\t0\t0\t0\t00F0FFFF\t0\t0\t0\n"


def default_route(interface: str, metric: int = 0, flags: str = "0003") -> str:
    return f"{interface}\t00000000\t01001FAC\t{flags}\t0\t0\t{metric}\t00000000\t0\t0\t0\n"


@pytest.mark.parametrize(
    ("interfaces", "routes", "expected"),
    [
        (["lo", "eth0"], default_route("eth0") + LOCAL.format("eth0"), "eth0"),  # a container, Amazon Linux 2
        (["lo", "ens5"], default_route("ens5", 100) + LOCAL.format("ens5"), None),  # Ubuntu 22.04 and 24.04 on EC2
        (["lo", "eth0", "ens5"], default_route("ens5") + LOCAL.format("eth0"), None),  # eth0 leads to its own net alone
        (["lo", "eth0", "ens5"], default_route("eth0", 200) + default_route("ens5", 100), None),  # the lower metric
        (["lo", "eth0"], default_route("eth0", flags="0002"), None),  # the route is down
        (["lo", "eth0"], None, None),  # no such table: not Linux, or no IPv4
    ],
)
def test_the_collectives_interface_is_set_where_the_default_route_uses_eth0(
    tmp_path: Path, interfaces: list[str], routes: str | None, expected: str | None
) -> None:
    for interface in interfaces:
        (tmp_path / "sys/class/net" / interface).mkdir(parents=True)
    if routes is not None:
        (tmp_path / "proc/net").mkdir(parents=True)
        (tmp_path / "proc/net/route").write_text(HEADER + routes, encoding="ascii")
    machine = Machine(tmp_path, 1024, 65536)
    assert planned("llama3_8b", environ=FOUR_HOSTS, machine=machine).environment.get("CCOM_SOCKET_IFNAME") == expected
    if expected:
        assert "CCOM_SOCKET_IFNAME" not in planned("llama3_8b", machine=machine).environment
        own = FOUR_HOSTS | {"CCOM_SOCKET_IFNAME": "ens7"}
        assert planned("llama3_8b", environ=own, machine=machine).environment["CCOM_SOCKET_IFNAME"] == "ens7"


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, resource.RLIM_INFINITY, 65535),
        (1024, 4096, 4096),
        (4096, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files(soft: int, hard: int, expected: int | None) -> None:
    machine = Machine(Path("/nonexistent"), soft, hard)
    found = planned("llama3_8b", machine=machine)
    assert found.open_files == expected
    assert found.text().startswith(f"ulimit -S -n {expected}  # ") == (expected is not None)
    assert planned("llama3_8b", "--platform", "cpu", machine=machine).open_files is None


def test_the_limit_is_raised_before_the_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that the command then replaces, with the environment of the ranks."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = before[1] if 0 <= before[1] < 65535 else 65535
    seen: list[object] = []

    def execute(program: str, command: list[str], environment: dict[str, str]) -> None:
        assert program == command[0]
        seen.extend((resource.getrlimit(resource.RLIMIT_NOFILE)[0], command, environment["NXD_MEMOPT_BACKEND"]))

    monkeypatch.setattr(os, "execvpe", execute)
    monkeypatch.setattr(Platform, "require_package", lambda platform: None)
    monkeypatch.delenv("NXD_MEMOPT_BACKEND", raising=False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        command.main(["--recipe", "llama3_8b", *TOKENIZER])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == [wanted, planned("llama3_8b").command, "xla"]


# ---- compile cache and ports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ({}, "localhost:48620"),
        (FOUR_HOSTS, "host0:48620"),
        (FOUR_HOSTS | {"MASTER_ADDR": "fd00::1"}, "[fd00::1]:48620"),
    ],
)
def test_a_fixed_port_of_the_runtime(hosts: dict[str, str], expected: str) -> None:
    found = planned("llama3_8b", "--root-comm-port", "48620", environ=hosts)
    assert found.environment["NEURON_RT_ROOT_COMM_ID"] == expected
    assert "NEURON_RT_ROOT_COMM_ID" not in planned("llama3_8b", environ=hosts).environment
    # Then it is not the master port, on which nothing listens for one host.
    assert planned("llama3_8b", "--master-port", "62182", "--root-comm-port", "48620").platform.name == "trn1"
    assert planned("llama3_8b", "--master-port", "62182").platform.name == "trn1"


# ---- names and packages ----------------------------------------------------------------------------------------------


def test_names_of_instances_are_understood() -> None:
    """As devices of plans and certificates, too."""
    for instance, name in INSTANCES.items():
        assert platform_named(instance).name == name.replace("trn1n", "trn1")
        device, ranks = device_and_ranks(instance)
        assert device.name == name.removesuffix("-3xlarge") and ranks in (2, 4, 32, 64)


def test_a_trn1_2xlarge_has_two_ranks() -> None:
    size = ("--parallel.tensor-model-parallel-size", "2")
    found = planned("llama3_8b", "--platform", "trn1.2xlarge", *size)
    assert found.command[2:5] == ["nxd_memopt.launch.agent", "--nproc", "2"]
    assert found.environment == TRN1 | dict.fromkeys(CORES, "2")
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size 8 is not one of \[1, 2\]"):
        planned("llama3_8b", "--platform", "trn1.2xlarge", environ=FOUR_HOSTS)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        (("--data.isolate-documents", "true"), True),  # the default, which the recipe changes
        (("--data.isolate-documents", "true", "--data.seq-length", "1536"), False),  # no kernel takes this length
    ],
)
def test_isolation_that_costs_the_kernel_is_noted(options: tuple[str, ...], noted: bool) -> None:
    notes = planned("llama3_8b", *options).notes
    assert ["36 tiles of 1024 x 1024 scores" in note for note in notes] == [True] * noted


def test_a_missing_package_is_named_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--platform trn2 needs torch_neuronx, which is not installed for "):
        PLATFORMS["trn2"].require_package()
    PLATFORMS["cpu"].require_package()
