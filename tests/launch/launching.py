"""What tests of the launcher share: a planned launch on a pretended host, and the environments expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nxd_memopt.launch import command
from nxd_memopt.launch.command import Launch, plan
from nxd_memopt.launch.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ("--model.tokenizer", "some/tokenizer", "--data.dataset", "some.jsonl")
CORES = ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES", "TPU_CHIPS_PER_HOST_BOUNDS")
TRN1 = {
    "NXD_MEMOPT_BACKEND": "xla",
    "PJRT_DEVICE": "NEURON",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",
    "NEURON_CC_FLAGS": "--model-type=transformer -O1",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
    **dict.fromkeys(CORES, "32"),
    "NEURON_RT_EXEC_TIMEOUT": "600",
    "MALLOC_ARENA_MAX": "64",
}
TRN2 = {
    "NXD_MEMOPT_BACKEND": "neuron",
    "NEURON_LOGICAL_NC_CONFIG": "2",
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
    "NEURON_RT_EXEC_TIMEOUT": "600",
    "MALLOC_ARENA_MAX": "64",
}
EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
FOUR_HOSTS = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "host0"}
UBUNTU = Machine(Path("/nonexistent"), soft_limit=1024, hard_limit=1048576)  # no eth0, no chips


def planned(
    recipe: str, *arguments: str, environ: Mapping[str, str] | None = None, machine: Machine = UBUNTU
) -> Launch:
    options, train_arguments = command.parser().separate(["--recipe", recipe, *TOKENIZER, *arguments])
    return plan(options, train_arguments, environ or {}, machine)
