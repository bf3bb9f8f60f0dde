"""Optimizers for parallel models: sharded states, fp32 master weights, fp32 moments, loss scaling."""

from nxd_memopt.optimizer.adamw import AdamW_FP32OptimParams
from nxd_memopt.optimizer.in_backward import OptimizerInBackward
from nxd_memopt.optimizer.loss_scaler import LossScaler
from nxd_memopt.optimizer.offloaded_zero1 import OffloadedZero1Optimizer
from nxd_memopt.optimizer.one_pass_adamw import AdamW
from nxd_memopt.optimizer.zero1 import NeuronZero1Optimizer

__all__ = [
    "AdamW",
    "AdamW_FP32OptimParams",
    "LossScaler",
    "NeuronZero1Optimizer",
    "OffloadedZero1Optimizer",
    "OptimizerInBackward",
]
