"""Tests that need an NVIDIA GPU: ``NXD_MEMOPT_BACKEND=cuda pytest tests/cuda``."""
