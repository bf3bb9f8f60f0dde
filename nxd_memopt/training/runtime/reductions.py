"""Sums of a run's values over its ranks."""

from __future__ import annotations

from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state


def sum_over_replicas_and_stages(value: Tensor) -> Tensor:
    """Sum ``value`` over data-parallel ranks and the stages of a pipeline. Tensor-parallel ranks have equal values."""
    value = backend.all_reduce(value, parallel_state.get_data_parallel_group())
    return backend.all_reduce(value, parallel_state.get_pipeline_model_parallel_group())
