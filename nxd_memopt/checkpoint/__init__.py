"""Sharded training checkpoints and import from and export to Hugging Face directories."""

from nxd_memopt.checkpoint.huggingface.exporting import save_pretrained
from nxd_memopt.checkpoint.huggingface.hf_config import load_config
from nxd_memopt.checkpoint.huggingface.importing import load_pretrained
from nxd_memopt.checkpoint.sharded.background import BackgroundSaver
from nxd_memopt.checkpoint.sharded.logical import TrainingState
from nxd_memopt.checkpoint.sharded.steps import find_latest, require_writable
from nxd_memopt.checkpoint.sharded.training import Restored, load_training_state, save_training_state
from nxd_memopt.parallel_layers.resharding import gather_full_tensor, local_slice

__all__ = [
    "BackgroundSaver",
    "Restored",
    "TrainingState",
    "find_latest",
    "gather_full_tensor",
    "load_config",
    "load_pretrained",
    "load_training_state",
    "local_slice",
    "require_writable",
    "save_pretrained",
    "save_training_state",
]
