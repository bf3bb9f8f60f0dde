"""Measures a training step: recomputed FLOPs, saved bytes, compiled graphs and their collectives."""
