"""Owns memory techniques that are applied to a model from outside."""

from nxd_memopt.memory.recompute import apply_recompute

__all__ = ["apply_recompute"]
