"""Every name that the programs which are written for neuronx-distributed import or look up, through the alias.

``test_compat.py`` starts it in a process with the alias. A script read the tables: imports, and attributes of what they
bind. ``EXAMPLES`` are examples/training of release 2.29 (revision fbac349); ``NXD_TRAINING`` is what
neuronx-distributed-training (9169aa0) has beyond them, and ``OPTIMUM_NEURON`` what training with optimum-neuron
(213224e) has beyond both. Left out are inference, the compile cache of ``libneuronxla``, and seven groups of embeddings
that NxD Training asks neuronx-distributed for, which has none of them either.
"""

from __future__ import annotations

import importlib

import pytest

EXAMPLES = {
    "neuronx_distributed": """
        finalize_checkpoint has_checkpoint initialize_parallel_model initialize_parallel_optimizer
        load_checkpoint neuronx_distributed_config save_checkpoint""",
    "neuronx_distributed.kernels.flash_attn": "nki_flash_attn_func",
    "neuronx_distributed.kernels.ring_attention_kernel": "nki_ring_attn_func",
    "neuronx_distributed.modules.lora": "LoraConfig",
    "neuronx_distributed.modules.moe.expert_mlps": "ExpertMLPs",
    "neuronx_distributed.modules.moe.loss_function": "load_balancing_loss_func",
    "neuronx_distributed.modules.moe.model": "MoE",
    "neuronx_distributed.modules.moe.routing": "RouterTopK",
    "neuronx_distributed.modules.qkv_linear": "GQAQKVColumnParallelLinear",
    "neuronx_distributed.optimizer": "NeuronZero1Optimizer",
    "neuronx_distributed.overrides.transformer_overrides": "apply_rotary_pos_emb",
    "neuronx_distributed.parallel_layers": """
        ColumnParallelLinear ParallelEmbedding RowParallelLinear checkpointing grads layer_norm layers
        mappings move_model_to_device parallel_state""",
    "neuronx_distributed.parallel_layers.checkpointing": "load save",
    "neuronx_distributed.parallel_layers.grads": "clip_grad_norm",
    "neuronx_distributed.parallel_layers.layer_norm": "LayerNorm",
    "neuronx_distributed.parallel_layers.layers": "ColumnParallelLinear ParallelEmbedding RowParallelLinear",
    "neuronx_distributed.parallel_layers.loss_functions": "parallel_cross_entropy",
    "neuronx_distributed.parallel_layers.mappings": """
        _gather_along_first_dim _split_along_first_dim gather_from_sequence_parallel_region
        scatter_to_sequence_parallel_region""",
    "neuronx_distributed.parallel_layers.pad": "generate_padding_mask",
    "neuronx_distributed.parallel_layers.parallel_state": """
        get_context_model_parallel_group get_context_model_parallel_rank get_context_model_parallel_size
        get_context_model_parallel_src_tgt_pairs get_data_parallel_group get_data_parallel_rank
        get_data_parallel_replica_groups get_data_parallel_size get_pipeline_model_parallel_rank
        get_tensor_model_parallel_rank get_tensor_model_parallel_replica_groups
        get_tensor_model_parallel_size initialize_model_parallel model_parallel_is_initialized rmsg""",
    "neuronx_distributed.parallel_layers.random": "model_parallel_xla_manual_seed",
    "neuronx_distributed.parallel_layers.utils": "divide get_local_world_size requires_init_pg_override",
    "neuronx_distributed.trainer": "initialize_parallel_model initialize_parallel_optimizer",
    "neuronx_distributed.utils.adamw_fp32_optim_params": "AdamW_FP32OptimParams",
    "neuronx_distributed.utils.batch_utils": "get_batch_on_this_context_parallel_rank",
    "neuronx_distributed.utils.logger": "get_logger",
    "neuronx_distributed.utils.model_utils": "move_model_to_device",
    "neuronx_distributed.utils.utils": "hardware",
    "neuronx_distributed.scripts.checkpoint_converter": "CheckpointConverterBase",
    "torch_xla.core.xla_model": """
        REDUCE_SUM add_step_closure all_reduce is_master_ordinal mark_step master_print mesh_reduce
        reduce_gradients rendezvous xla_device""",
    "torch_xla.distributed.parallel_loader": "MpDeviceLoader",
    "torch_xla.distributed.xla_multiprocessing": "spawn",
    "torch_xla.experimental.pjrt_backend": "",
    "torch_xla.runtime": "global_ordinal local_ordinal world_size",
    "torch_xla.utils.checkpoint": "checkpoint",
}
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


@pytest.mark.parametrize("table", [EXAMPLES, NXD_TRAINING, OPTIMUM_NEURON], ids=["examples", "training", "optimum"])
def test_offered_names(table: dict[str, str]) -> None:
    for module, names in table.items():
        for name in names.split():
            look_up(module, name)
        if not names:
            importlib.import_module(module)
