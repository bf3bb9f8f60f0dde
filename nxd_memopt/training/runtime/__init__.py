"""Processes, signals, errors and locks of a run."""
