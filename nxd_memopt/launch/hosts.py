"""Finds the hosts of a run and this host's rank, from options or SLURM's variables, for torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Below Linux's ephemeral ports (32768 and up), so no outgoing connection can occupy it.
MASTER_PORT = 29500


@dataclass(frozen=True)
class Hosts:
    """Hosts of one run.

    Args:
        count: number of hosts.
        rank: number of this host, counted from 0.
        address: address of host 0; required with several hosts.
        port: port on host 0 of torchrun's rendezvous.

    Raises:
        ValueError: a number is out of range, or the address is missing.
    """

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int = MASTER_PORT

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a run needs at least 1 host, got {self.count}: check --nodes and SLURM_NNODES")
        if not 0 <= self.rank < self.count:
            raise ValueError(f"node rank {self.rank} is outside [0, {self.count}): --node-rank and --nodes must fit")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"master port {self.port} is outside [1, 65535]: check --master-port and MASTER_PORT")
        if self.count > 1 and not self.address:
            raise ValueError(
                f"{self.count} hosts need host 0's address: pass --master-addr, or export "
                "MASTER_ADDR as scripts/launch/slurm.sbatch does"
            )

    def torchrun_options(self, processes: int) -> list[str]:
        """Return torchrun's options to start ``processes`` ranks on this one of several hosts."""
        # Several hosts must agree on host 0's address and port in advance.
        node = ["--nnodes", str(self.count), "--node_rank", str(self.rank)]
        rendezvous = ["--master_addr", str(self.address), "--master_port", str(self.port)]
        return [*node, *rendezvous, "--nproc_per_node", str(processes)]


def find_hosts(
    environ: Mapping[str, str],
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Hosts:
    """Return the hosts of the run from options, then from environment variables.

    Args:
        environ: present environment variables.
        nodes: number of hosts; ``None`` takes SLURM_NNODES, or 1.
        node_rank: number of this host; ``None`` takes SLURM_NODEID, or 0.
        master_addr: address of host 0; ``None`` takes MASTER_ADDR.
        master_port: port on host 0; ``None`` takes MASTER_PORT, or 29500.

    Raises:
        ValueError: for a second SLURM task on one host, a variable that is not a number, or a
            missing address or host number.
    """
    # SLURM starts this program once per task. With several tasks per host each would start all
    # ranks of the host.
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise ValueError(
            f"SLURM_LOCALID is {environ['SLURM_LOCALID']}: torchrun starts the ranks of a host "
            "itself, so start one task per host with srun --ntasks-per-node=1"
        )
    count = nodes
    if count is None:
        count = _number(environ, "SLURM_NNODES", 1)
    # Rank 0 is no default for several hosts: each host would start the rendezvous of its own run
    # and wait for the others.
    if count > 1 and node_rank is None and "SLURM_NODEID" not in environ:
        raise ValueError(f"{count} hosts need this one's number: start the launcher by srun, or pass --node-rank")
    # SLURM_NODEID is ignored by a run on one host: inside an allocation of several hosts it may
    # be above 0, which Hosts would reject.
    rank = 0
    if node_rank is not None:
        rank = node_rank
    elif count > 1:
        rank = _number(environ, "SLURM_NODEID", 0)
    port = master_port
    if port is None:
        port = _number(environ, "MASTER_PORT", MASTER_PORT)
    return Hosts(count, rank, master_addr or environ.get("MASTER_ADDR"), port)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return an environment variable as an int, or ``default`` if it is not set."""
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number, got {text!r}")
    return int(text)
