"""Optimizers for parallel models: sharded states, fp32 master weights, fp32 moments."""

from nxd_memopt.optimizer.adamw import AdamW_FP32OptimParams
from nxd_memopt.optimizer.in_backward import OptimizerInBackward
from nxd_memopt.optimizer.one_pass_adamw import AdamW
from nxd_memopt.optimizer.zero1 import NeuronZero1Optimizer

__all__ = ["AdamW", "AdamW_FP32OptimParams", "NeuronZero1Optimizer", "OptimizerInBackward"]
