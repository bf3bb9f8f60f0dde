"""The CUDA backend: NCCL, collectives through peer memory, attention kernels, host transfers."""
