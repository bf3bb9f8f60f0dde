"""Operators for NVIDIA GPUs; importing this package needs neither Triton nor flash-attn-4."""
