"""Shapes, parameters and optimizer states of one rank."""
