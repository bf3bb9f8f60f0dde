"""Every name that neuronx-distributed's training examples import or look up, through the alias.

``test_compat.py`` starts it in a process with the alias. The table was read from examples/training of release 2.29
(revision fbac349) by a script: imports, and attributes of what they bind.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

OFFERED = {
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
MISSING = {
    "neuronx_distributed.lightning": """
        NeuronHooksCallback NeuronLTModule NeuronTQDMProgressBar NeuronTensorBoardLogger
        NeuronXLAPrecisionPlugin NeuronXLAStrategy""",
}
MIGRATION_GUIDE = Path(__file__).resolve().parents[2] / "docs" / "migrating_from_nxd.md"


def look_up(module: str, name: str) -> object:
    """As ``from module import name`` does; ``module`` may itself be an attribute."""
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        parent, _, child = module.rpartition(".")
        owner = getattr(importlib.import_module(parent), child)
    return getattr(owner, name)


@pytest.mark.parametrize("module", OFFERED)
def test_offered_names(module: str) -> None:
    importlib.import_module(module)
    for name in OFFERED[module].split():
        assert look_up(module, name) is not None, name


@pytest.mark.parametrize("module", MISSING)
def test_missing_names_say_so_and_are_documented(module: str) -> None:
    """An example that needs one stops at its import, and the guide lists it. Once offered, it joins the other table."""
    for name in MISSING[module].split():
        with pytest.raises((ImportError, AttributeError), match="is not offered by nxd_memopt"):
            look_up(module, name)
        assert f"`{name}`" in MIGRATION_GUIDE.read_text(encoding="utf-8"), name
