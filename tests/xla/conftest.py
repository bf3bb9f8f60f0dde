"""Owns the environment of the XLA track: a simulated NeuronCore per process, and nothing where torch_xla is missing."""

from __future__ import annotations

import importlib.util
import os

COMPILE_FAST = "--xla_backend_optimization_level=0"  # of machine code; the graph's optimisations stay

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(NXD_MEMOPT_BACKEND="xla", PJRT_DEVICE="CPU", NEURON_CC_FLAGS="-O1", XLA_FLAGS=COMPILE_FAST)
