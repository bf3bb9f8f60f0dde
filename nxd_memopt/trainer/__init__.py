"""neuronx-distributed's trainer functions: configuration, model, optimizer, checkpoints."""

from nxd_memopt.trainer.activation_checkpoint import apply_activation_checkpointing, checkpoint_wrapper
from nxd_memopt.trainer.batch import get_batch_on_this_context_parallel_rank
from nxd_memopt.trainer.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from nxd_memopt.trainer.configuration import neuronx_distributed_config
from nxd_memopt.trainer.model import NxDModel, initialize_parallel_model
from nxd_memopt.trainer.nxd_training_state import load_nxd_training_state
from nxd_memopt.trainer.optimizer import NxDOptimizer, initialize_parallel_optimizer

__all__ = [
    "NxDModel",
    "NxDOptimizer",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "finalize_checkpoint",
    "get_batch_on_this_context_parallel_rank",
    "has_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "load_nxd_training_state",
    "neuronx_distributed_config",
    "save_checkpoint",
]
