"""What the launcher refuses: options, hosts, ports and variables that do not fit the platform or the configuration."""

from __future__ import annotations

import pytest

from tests.launch.launching import FOUR_HOSTS, planned

TRN2 = ("--platform", "trn2")


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        # the compiler and the backend
        ((), {"NEURON_CC_FLAGS": "--optlevel 3"}, "NEURON_CC_FLAGS says -O3"),
        ((), {"NEURON_CC_FLAGS": "--cache_dir='x"}, "cannot be split into words"),
        ((), {"NXD_MEMOPT_BACKEND": "cpu"}, "NXD_MEMOPT_BACKEND is 'cpu' in the environment, but this run needs 'xla'"),
        ((), {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}, "NEURON_RT_STOCHASTIC_ROUNDING_EN is '1'"),
        ((), {"XLA_DOWNCAST_BF16": "1"}, "XLA_DOWNCAST_BF16=1 makes every fp32 tensor bf16"),
        (("--compile", "--platform", "cpu"), {}, "--compile is for trn1's ahead-of-time compiler"),
        # ranks and cores
        (("--parallel.tensor-model-parallel-size", "16"), {}, "tensor_model_parallel_size 16 is not one of"),
        (("--nproc", "12"), {}, "world size 12 is not divisible by tensor_model_parallel_size 8"),
        (("--nproc", "0"), {}, "--nproc: must be at least 1, got '0'"),
        ((*TRN2, "--nproc", "128"), {}, "128 exceeds the 64 logical NeuronCores"),
        (("--platform", "trn3"), {}, "no /dev/neuron.*: pass --nproc, 4 for each chip"),
        (("--platform", "trn2-lnc1"), {"NEURON_LOGICAL_NC_CONFIG": "2"}, "is '2' in the environment, but .* needs '1'"),
        (TRN2, {"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, "NEURON_RT_VIRTUAL_CORE_SIZE is '1'"),
        (TRN2, {"NEURON_RT_NUM_CORES": "8"}, "NEURON_RT_NUM_CORES is '8' .* needs '64'"),
        # hosts and ports
        (("--nodes", "0"), {}, "a run needs at least 1 host, got 0"),
        ((), FOUR_HOSTS | {"MASTER_PORT": "99999"}, "master port 99999 is outside"),
        (("--nodes", "2", "--node-rank", "0"), {}, "2 hosts need host 0's address"),
        (("--nodes", "2", "--master-addr", "a"), {}, "2 hosts need this one's number"),
        (("--nodes", "2", "--node-rank", "2", "--master-addr", "a"), {}, r"node rank 2 is outside \[0, 2\)"),
        ((), FOUR_HOSTS | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID is 1: torchrun starts the ranks of a host itself"),
        ((), FOUR_HOSTS | {"SLURM_NNODES": "²"}, "SLURM_NNODES must be a number"),
        (("--root-comm-port", "29500"), FOUR_HOSTS, "differ from the master port 29500"),
        (("--master-port", "62182"), FOUR_HOSTS, "the master port 62182 is the Neuron runtime's"),
        (("--root-comm-port", "48620", "--platform", "cpu"), {}, "--root-comm-port is the Neuron runtime's"),
        (("--root-comm-port", "5"), {"NEURON_RT_ROOT_COMM_ID": "a:6"}, "NEURON_RT_ROOT_COMM_ID is 'a:6'"),
    ],
)
def test_refusals(arguments: tuple[str, ...], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned("llama3_8b", *arguments, environ=environ)
