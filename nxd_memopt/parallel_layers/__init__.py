"""Everything that communicates, under NxD's names: parallel state, mappings, layers, losses and gradients."""
