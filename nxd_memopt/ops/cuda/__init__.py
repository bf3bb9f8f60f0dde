"""Owns what is written for NVIDIA GPUs in Triton; importing it needs no Triton."""
