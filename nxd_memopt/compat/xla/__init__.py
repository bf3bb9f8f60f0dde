"""torch_xla's names over the chosen backend, for environments without torch_xla."""

from __future__ import annotations

from nxd_memopt.compat.table import build_table
from nxd_memopt.compat.xla import device, process_group

__all__ = ["NAMES", "device", "process_group"]

VERSION = "2.9.0"
"""The release of torch_xla whose functions these are."""

_MODEL = f"{__name__}.model"
_RUNTIME = f"{__name__}.runtime"
_PROGRAM = f"{__name__}.program"

# torch_xla's module -> [(our module, names)]. A name is written "theirs=ours" if the names
# differ. An absent name is an ImportError that names the nearest one. pjrt_backend is empty:
# scripts import it only to register torch_xla's backend of torch.distributed. Every process group
# is a ProcessGroupXla: none needs to be created again for torch_xla.
_TABLE = {
    "": [(__name__, "__version__=VERSION"), (_MODEL, "device=xla_device sync=mark_step"), (_PROGRAM, "launch")],
    "core": [],
    "core.xla_model": [
        (
            _MODEL,
            "REDUCE_SUM REDUCE_MAX REDUCE_MIN xla_device mark_step rendezvous add_step_closure master_print "
            "is_master_ordinal all_reduce reduce_gradients optimizer_step all_gather reduce_scatter mesh_reduce save "
            "set_rng_state get_rng_state ToXlaTensorArena wait_device_ops=synchronize",
        ),
        (_RUNTIME, "xrt_world_size=world_size get_ordinal=global_ordinal get_local_ordinal=local_ordinal"),
    ],
    "core.xla_env_vars": [],
    "runtime": [
        (_RUNTIME, "world_size global_ordinal local_ordinal local_process_count device_type global_device_count")
    ],
    "distributed": [],
    "distributed.parallel_loader": [(_PROGRAM, "MpDeviceLoader ParallelLoader PerDeviceLoader")],
    "distributed.xla_multiprocessing": [(_PROGRAM, "spawn")],
    "distributed.xla_backend": [("torch.distributed", "ProcessGroupXla=ProcessGroup")],
    "distributed.zero_redundancy_optimizer": [("nxd_memopt.optimizer", "ZeroRedundancyOptimizer=NeuronZero1Optimizer")],
    "experimental": [],
    "experimental.pjrt_backend": [],
    "utils": [],
    "utils.checkpoint": [("nxd_memopt.memory.recompute", "checkpoint")],
    "utils.serialization": [("nxd_memopt.parallel_layers.tensor_files", "TensorReference")],
    "debug": [],
    "debug.metrics": [(_PROGRAM, "metrics_report short_metrics_report=metrics_report")],
}

NAMES = build_table("torch_xla", _TABLE)
"""Alias module -> alias name -> ``"our.module:name"``."""
