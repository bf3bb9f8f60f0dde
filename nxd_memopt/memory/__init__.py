"""Memory techniques that are applied to a model, or to its forward and backward, from outside."""

from nxd_memopt.memory.apply import apply_memory
from nxd_memopt.memory.compiled import is_compiled
from nxd_memopt.memory.cuda_graph import GraphedLoss
from nxd_memopt.memory.recompute import apply_recompute, checkpoint, is_recomputed
from nxd_memopt.memory.weight_offload import weights_to_device

__all__ = [
    "GraphedLoss",
    "apply_memory",
    "apply_recompute",
    "checkpoint",
    "is_compiled",
    "is_recomputed",
    "weights_to_device",
]
