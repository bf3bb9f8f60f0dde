"""Base of both backends of Trainium: what the chip and neuronx-cc decide, whichever package drives them."""

from __future__ import annotations

import os

from nxd_memopt.backends.base import Backend
from nxd_memopt.backends.c10d import C10dBackend
from nxd_memopt.backends.neuron import LOSS_SCALING_REFUSAL, MOST_OF_TOP_K
from nxd_memopt.backends.neuron.topology import hardware_name, neuron_kv_rank_stride, neuron_order


class TrainiumBackend(C10dBackend):
    """Device whose programs neuronx-cc compiles for fixed shapes."""

    shapes_are_static = True
    most_of_top_k = MOST_OF_TOP_K
    scalars_are_compiled = True
    rounds_matmuls = True  # neuronx-cc's default, --auto-cast=matmult
    # torch_xla's graphs are functional: a write to a view makes a new tensor. TorchNeuron does not promise more.
    views_share_memory = False
    # The shapes of a graph are fixed when it is traced: the numbers of rows cannot depend on values.
    all_to_all_rows = Backend.all_to_all_rows

    def device_order(self, world_size: int, tensor_model_parallel_size: int) -> list[int]:
        return neuron_order(os.environ, world_size, tensor_model_parallel_size)

    def kv_rank_stride(self, tensor_model_parallel_size: int, replicas: int) -> int:
        return neuron_kv_rank_stride(os.environ, tensor_model_parallel_size, replicas)

    def hardware_name(self) -> str:
        return hardware_name(os.environ)

    def loss_scaling_refusal(self) -> str:
        return LOSS_SCALING_REFUSAL
