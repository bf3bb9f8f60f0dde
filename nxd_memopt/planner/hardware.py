"""Devices: memory of one rank, and the part of it that tensors cannot use."""

from __future__ import annotations

GIB = 2**30
DEVICE_GIB = {"trn1": 16.0, "trn2": 24.0, "trn2-lnc1": 12.0, "trn3": 36.0}
"""Memory in GiB of one rank's device.

trn1: one NeuronCore. trn2: a logical core of two physical cores (LNC 2). trn2-lnc1: a logical core
of one physical core; two of them share a memory bank.
"""
RESERVE_GIB = 1.25
"""Memory that tensors cannot use: runtime microcode, collective buffers and compiled programs.

This is an estimate."""
