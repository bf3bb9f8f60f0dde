"""Every name that the programs which are written for neuronx-distributed import or look up, through the alias.

``test_compat.py`` starts it in a process with the alias. A script read the tables: imports, and attributes of what they
bind. The examples of release 2.29 (revision fbac349) are run themselves (tests/nxd_upstream); ``NXD_TRAINING`` is what
neuronx-distributed-training (9169aa0) has beyond them, and ``OPTIMUM_NEURON`` what training with optimum-neuron
(213224e) has beyond both. Left out are inference, the compile cache of ``libneuronxla``, and seven groups of embeddings
that NxD Training asks neuronx-distributed for, which has none of them either.
"""

from __future__ import annotations

import importlib

import pytest

NXD_TRAINING = {
    "neuronx_distributed": "modules parallel_layers trainer",
    "neuronx_distributed.modules": "lora",
    "neuronx_distributed.modules.moe.routing": "RouterSinkhorn",
    "neuronx_distributed.modules.rms_norm": "RMSNorm",
    "neuronx_distributed.parallel_layers": "random",
    "neuronx_distributed.parallel_layers.loss_functions": "from_parallel_logits_to_logprobs",
    "neuronx_distributed.parallel_layers.mappings": "split_tensor_along_last_dim",
    "neuronx_distributed.parallel_layers.parallel_state": """
        get_pipeline_model_parallel_group get_pipeline_model_parallel_size get_tensor_model_parallel_group""",
    "neuronx_distributed.parallel_layers.random": "get_xla_rng_tracker",
    "neuronx_distributed.parallel_layers.utils": "param_is_not_tensor_parallel_duplicate",
    "neuronx_distributed.trainer": "checkpoint",
    "neuronx_distributed.trainer.checkpoint": "g_iostate",
    "neuronx_distributed.utils.utils.hardware": "TRN1 TRN2",
    "torch_neuronx.utils": "get_platform_target",
    "torch_xla": "runtime",
    "torch_xla.core.xla_env_vars": "",
    "torch_xla.distributed.zero_redundancy_optimizer": "ZeroRedundancyOptimizer",
    "torch_xla.utils.serialization": "TensorReference",
}
OPTIMUM_NEURON = {
    "neuronx_distributed": "pipeline",
    "neuronx_distributed.parallel_layers.grads": "bucket_allreduce_gradients",
    "neuronx_distributed.parallel_layers.layers": "BaseParallelLinear create_local_weight",
    "neuronx_distributed.parallel_layers.mappings": "reduce_from_tensor_model_parallel_region",
    "neuronx_distributed.parallel_layers.parallel_state": "get_pipeline_model_parallel_replica_groups",
    "neuronx_distributed.parallel_layers.utils": "EmbeddingUtility move_all_tensor_to_cpu move_model_to_device",
    "neuronx_distributed.pipeline": "NxDPPModel model",
    "neuronx_distributed.pipeline.model": "trace_model",
    "neuronx_distributed.pipeline.partition": "analyze_shared_weights_across_stages",
    "neuronx_distributed.pipeline.trace": "HFTracerWrapper NxDTracer trace_model",
    "neuronx_distributed.trainer": "save_checkpoint",
    "neuronx_distributed.utils.activation_checkpoint": "apply_activation_checkpointing",
    "neuronx_distributed.utils.model_utils": "LogicalNCConfig get_platform_lnc",
    "torch_xla": "__version__ sync",
    "torch_xla.core.xla_model": "ToXlaTensorArena all_gather get_local_ordinal save",
    "torch_xla.distributed.parallel_loader": "ParallelLoader PerDeviceLoader",
    "torch_xla.distributed.xla_backend": "ProcessGroupXla",
}


def look_up(module: str, name: str) -> object:
    """As ``from module import name`` does; ``module`` may itself be an attribute."""
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        parent, _, child = module.rpartition(".")
        owner = getattr(importlib.import_module(parent), child)
    return getattr(owner, name)


@pytest.mark.parametrize("table", [NXD_TRAINING, OPTIMUM_NEURON], ids=["training", "optimum"])
def test_offered_names(table: dict[str, str]) -> None:
    for module, names in table.items():
        for name in names.split():
            look_up(module, name)
        if not names:
            importlib.import_module(module)
