"""Owns everything that communicates: parallel state, mappings, layers, losses and gradients, under NxD's names."""
