"""Autograd functions and the collectives around them, below the layers."""
