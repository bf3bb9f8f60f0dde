"""All communicating code under NxD's names: parallel state, mappings, layers, losses, gradients."""
