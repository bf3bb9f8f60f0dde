"""Optimizers on one process."""
