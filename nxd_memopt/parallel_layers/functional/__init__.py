"""Autograd functions of the parallel layers, with the collectives that they overlap."""
