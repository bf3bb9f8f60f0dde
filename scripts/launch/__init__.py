"""Owns how training is started: environments and torchrun commands for Trainium, GPUs and CPUs."""
