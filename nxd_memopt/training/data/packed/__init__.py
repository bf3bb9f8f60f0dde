"""Packed tokens of a run on disk."""
