"""Certifies a training step without its hardware: recompute, collectives, graphs, memory."""

from nxd_memopt.certify.measure.baseline import without_recompute
from nxd_memopt.certify.measure.survival import Survival, assert_recompute_survives

__all__ = ["Survival", "assert_recompute_survives", "without_recompute"]
