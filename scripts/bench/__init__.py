"""Benchmarks, whose rows are recorded in docs/benchmarks/."""
