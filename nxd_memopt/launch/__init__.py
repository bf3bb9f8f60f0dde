"""Starts training: environments and commands for Trainium, GPUs and CPUs, and the agent of one host's ranks."""
