"""Tests of the alias for neuronx-distributed; each script runs in a process of its own."""
