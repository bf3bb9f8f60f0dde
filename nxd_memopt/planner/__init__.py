"""Sizes, memory and communication of a training step, computed without torch."""
