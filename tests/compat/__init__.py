"""Owns the tests of the alias for neuronx-distributed; each script runs in a process of its own, which it aliases."""
