"""Builds the environment of ranks on Trainium: each variable with its reason and its versions.

Sources: AWS's launchers of neuronx-distributed and NxD Training, the Neuron SDK's documentation
up to 2.33, torch_xla 2.9 and TorchNeuron's published source (2.10 to 2.12). None of it has run on
a device here.
"""

from __future__ import annotations

from collections.abc import Mapping

from nxd_memopt.launch.variables import Run, Variable
from nxd_memopt.planner.search.problem import NKI_MULTIPLE
from nxd_memopt.planner.techniques.attention_tiles import describe_tiles
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import host_only

# Group sizes with collectives on trn1: AWS's list, and strided groups of 4.
TRN1_GROUP_SIZES = (1, 2, 4, 8, 32)
TRN1_2XLARGE_GROUP_SIZES = (1, 2)  # one chip
DOWNCASTS = ("XLA_DOWNCAST_BF16", "XLA_USE_BF16")
# The runtime's default on trn1 according to its developer guide; its configuration guide says 30.
EXEC_TIMEOUT_S = 600
TORCH_XLA = "torch-neuronx 2.9, torch-xla"
UNTIL_231 = "Neuron SDK <= 2.30; from 2.31 on the runtime ignores it with a warning"
TORCH_NEURON = "TorchNeuron: torch-neuronx 2.10 and newer"
MODEL_TYPE = "--model-type=transformer"


def trn1(run: Run, group_sizes: tuple[int, ...] = TRN1_GROUP_SIZES) -> list[Variable]:
    """Return the environment variables of ranks on trn1, which use torch_xla.

    Raises:
        ValueError: the hardware has no collectives for the tensor-parallel size, or flags or
            variables contradict the configuration.
    """
    size = run.config.parallel.tensor_model_parallel_size
    if size not in group_sizes:
        raise ValueError(
            f"parallel.tensor_model_parallel_size {size} is not one of {list(group_sizes)}, the group sizes for which "
            "the platform has collectives: choose one of them"
        )
    refuse_downcasts(run.environ)
    flags = neuron_cc_flags(run.config, run.environ.get("NEURON_CC_FLAGS", ""))
    cores = str(run.processes)
    # A step of stages is several graphs for each micro-batch; neuronx-distributed's recipes have 7 for them.
    ahead = "3"
    if run.config.parallel.pipeline_model_parallel_size > 1:
        ahead = "7"
    # Three groups: what selects the device and the library's code path, what changes numerics or
    # speed of the compiled graphs, and the number of cores, which the runtime, AWS's launchers
    # and torch_xla's PJRT client read under four names. All four must equal torchrun's number of
    # ranks on this host, so they are fixed.
    return [
        Variable("NXD_MEMOPT_BACKEND", "xla", "fail rather than train on another device", "fixed"),
        Variable("PJRT_DEVICE", "NEURON", "torch-xla runs on NeuronCores, not on its CPU simulation", "fixed"),
        functionalization(),
        Variable("NEURON_CC_FLAGS", flags, "the compiler's options; recompute needs -O1", "combined"),
        Variable("NEURON_FUSE_SOFTMAX", "1", "softmax reaches the compiler as one operation", versions=TORCH_XLA),
        _stochastic_rounding(run.config),
        Variable(
            "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", ahead, "graphs that the host runs ahead", versions=UNTIL_231
        ),
        Variable("NEURON_RT_NUM_CORES", cores, "NeuronCores on this host, one per process", "fixed"),
        Variable("NUM_NEURONCORES", cores, "the same, as AWS's launchers name it", "fixed"),
        Variable("TPU_NUM_DEVICES", cores, "the same, for torch-xla's PJRT client", "fixed", TORCH_XLA),
        Variable("TPU_CHIPS_PER_HOST_BOUNDS", cores, "the same, for torch-xla's topology", "fixed", TORCH_XLA),
        *_runtime(run),
    ]


def torch_neuron(run: Run, logical_nc_config: int) -> list[Variable]:
    """Return the environment variables of ranks on trn2 and trn3, which use TorchNeuron.

    Args:
        run: the run to be started.
        logical_nc_config: LNC, physical NeuronCores per logical core; each rank has one logical
            core.
    """
    lnc = str(logical_nc_config)
    ranks = "LNC, physical cores of one rank: the platform's number of ranks follows from it"
    fallback = "an operation that fails on the device is an error, not a silent detour through the CPU"
    return [
        Variable("NXD_MEMOPT_BACKEND", "neuron", "fail rather than train on another device", "fixed"),
        Variable("NEURON_LOGICAL_NC_CONFIG", lnc, ranks, "fixed", "Neuron SDK 2.21 and newer"),
        *_if_present(run, "NEURON_RT_VIRTUAL_CORE_SIZE", lnc, "the older name of the same"),
        *_if_present(run, "NEURON_RT_NUM_CORES", str(run.processes), "logical cores on this host, one per process"),
        Variable("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", "1", fallback, versions=TORCH_NEURON),
        _stochastic_rounding(run.config),
        *_runtime(run),
    ]


def _if_present(run: Run, name: str, value: str, reason: str) -> list[Variable]:
    """Return a fixed variable if the environment has one of its name.

    The ranks do not need it: ``merged`` then rejects a value that contradicts the run.
    """
    if name not in run.environ:
        return []
    return [Variable(name, value, reason, "fixed")]


def functionalization() -> Variable:
    """Return the variable that keeps torch_xla's functionalization on."""
    # torch_neuronx runs torch_xla without functionalization unless the environment sets this
    # variable to 0. It is a default, not fixed: the library itself avoids the operation below.
    reason = (
        "with functionalization off, trn1's default, Tensor.split with a list of sizes returns wrong data "
        "(pytorch/xla#8640)"
    )
    return Variable("XLA_DISABLE_FUNCTIONALIZATION", "0", reason, versions="torch-xla 2.1 to 2.9")


def _stochastic_rounding(config: TrainConfig) -> Variable:
    """Return the variable that turns the device's stochastic rounding on or off."""
    # Without fp32 masters, updates smaller than the rounding step of bf16 would be lost; rounded
    # stochastically they are kept on average.
    is_on = config.dtype == "bfloat16" and not config.master_weights
    reason = "1 for bf16 weights without fp32 masters, 0 otherwise (trainer.precision)"
    return Variable("NEURON_RT_STOCHASTIC_ROUNDING_EN", str(int(is_on)), reason, "fixed")


def neuron_cc_flags(config: TrainConfig, environment_flags: str) -> str:
    """Return the flags for the compiler: of the model's type, then the environment's; ``-O1`` with recompute.

    Args:
        config: configuration of the run.
        environment_flags: NEURON_CC_FLAGS of the environment, or an empty string.

    Raises:
        ValueError: recompute is on and another optimization level is set, or the flags cannot be
            parsed.
    """
    with host_only():
        from nxd_memopt.backends.neuron.compiler_flags import (
            optimization_level,
            recompute_error,
            with_optimization_level,
        )
    flags = f"{MODEL_TYPE} {environment_flags}".strip()
    if config.memory.recompute_granularity is None and not config.auto_memory:
        return flags
    # The compiler takes the last level, so -O1 in front is a default: a level in the environment
    # still wins, and recompute_error rejects others.
    flags = f"-O1 {flags}"
    error = recompute_error(flags)
    if error is not None:
        raise ValueError(f"{error} (the environment's NEURON_CC_FLAGS)")
    return with_optimization_level(flags, optimization_level(flags))


def isolation_note(run: Run) -> str | None:
    """Return a warning if documents are isolated by tiles where AWS's kernel could run, or None."""
    data = run.config.data
    if not data.isolate_documents or data.seq_length % NKI_MULTIPLE:
        return None
    return (
        f"data.isolate_documents is true: attention runs in plain operations, {describe_tiles(data.seq_length)}; with "
        "false NeuronCores can run AWS's kernel, and documents of a row attend to each other"
    )


def _runtime(run: Run) -> list[Variable]:
    """Return the variables that the Neuron runtime and glibc read on all Trainium platforms."""
    between_hosts = []
    if run.hosts.count > 1:
        between_hosts = _between_hosts(run)
    # Without MALLOC_ARENA_MAX, glibc creates up to 8 arenas per core of the host in each rank,
    # and memory that is freed in one arena is not reused by threads of another.
    return [
        Variable(
            "NEURON_RT_EXEC_TIMEOUT",
            str(EXEC_TIMEOUT_S),
            "seconds until a graph's execution counts as hung: a rank waits inside it for the "
            "slowest rank, which may still compile or read a checkpoint",
            versions="Neuron Runtime 2.0 and newer",
        ),
        Variable("MALLOC_ARENA_MAX", "64", "bounds what glibc's malloc keeps per thread: many ranks share a host"),
        *_root_comm_id(run),
        *between_hosts,
    ]


def _root_comm_id(run: Run) -> list[Variable]:
    """Return the address of the Neuron runtime's rendezvous, if its port is fixed."""
    if run.root_comm_port is None:
        return []
    # The runtime takes host:port, where an IPv6 address needs brackets.
    address = run.hosts.address or "localhost"
    if ":" in address:
        address = f"[{address}]"
    reason = "where the runtime's collectives meet (--root-comm-port)"
    return [Variable("NEURON_RT_ROOT_COMM_ID", f"{address}:{run.root_comm_port}", reason, "fixed")]


def _between_hosts(run: Run) -> list[Variable]:
    """Return the variables of collectives between hosts, which use EFA through libfabric."""
    # EFA is AWS's network adapter. Kernels from 5.15 on copy registered pages at fork, so the
    # variable about fork matters for older kernels only. The interface serves the setup of
    # collectives over TCP; it is named only where eth0 is known to be the right one.
    interface = run.machine.container_interface()
    variables = [
        Variable("FI_PROVIDER", "efa", "collectives between hosts go through EFA, not TCP"),
        Variable("FI_EFA_USE_DEVICE_RDMA", "1", "the network card reads device memory without a copy through the host"),
        Variable(
            "FI_EFA_FORK_SAFE", "1", "libfabric stays usable where Python forks", versions="Linux kernels below 5.15"
        ),
    ]
    if interface is not None:
        reason = "the interface over which collectives are set up, as in AWS's containers: the default route's"
        variables.append(Variable("CCOM_SOCKET_IFNAME", interface, reason))
    return variables


def refuse_downcasts(environ: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if a torch_xla variable would convert fp32 master weights to bf16."""
    for name in DOWNCASTS:
        if environ.get(name, "0") != "0":
            raise ValueError(
                f"{name}={environ[name]} makes every fp32 tensor bf16, fp32 master weights too: "
                "unset it and set trainer.precision to bf16-mixed"
            )
