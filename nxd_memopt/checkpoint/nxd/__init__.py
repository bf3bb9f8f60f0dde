"""neuronx-distributed's checkpoints of its LLaMA and GPT-NeoX samples: read, written and converted."""

from nxd_memopt.checkpoint.nxd.converting import from_nxd, load_nxd, to_nxd

__all__ = ["from_nxd", "load_nxd", "to_nxd"]
