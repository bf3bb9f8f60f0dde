"""Starts training: environments and torchrun commands for Trainium, GPUs and CPUs."""
