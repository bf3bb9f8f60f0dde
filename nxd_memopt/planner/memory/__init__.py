"""Bytes of a training step on one rank."""
