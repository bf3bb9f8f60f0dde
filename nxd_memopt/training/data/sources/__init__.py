"""Readers of datasets: local files, saved datasets, the hub."""
