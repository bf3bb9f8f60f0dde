"""Races of ours against peers, each with its rows in docs/benchmarks."""
