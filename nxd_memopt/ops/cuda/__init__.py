"""Owns what is written for NVIDIA GPUs alone; importing it needs neither Triton nor flash-attn-4."""
