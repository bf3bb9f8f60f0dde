"""Continuing a run: what may change, and from which checkpoint."""
