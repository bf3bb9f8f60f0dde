"""The developer guide's blocks on simulated NeuronCores, and torch's checkpoint function under the alias there."""

from __future__ import annotations

from tests.guide.test_guide import test_blocks_equal_one_rank

__all__ = ["test_blocks_equal_one_rank"]
