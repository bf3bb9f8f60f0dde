"""Table of neuronx-distributed's names and the objects that they resolve to."""

from __future__ import annotations

from nxd_memopt.compat.table import Sources, build_table

_OURS = "nxd_memopt.parallel_layers"
_COMPAT = "nxd_memopt.compat"
_MOE = "nxd_memopt.modules.moe.nxd"

# Functions with neuronx-distributed's signature resolve to this library's modules. A function whose
# arguments, defaults or values differ has an adapter of the same name in nxd_memopt.compat, and the
# table names the adapter: a script must not get another meaning for a call by position.
_PARALLEL_STATE = """
    destroy_model_parallel model_parallel_is_initialized is_global_rank_zero rmsg get_world_group
    get_tensor_model_parallel_group get_tensor_model_parallel_replica_groups
    get_tensor_model_parallel_size get_tensor_model_parallel_rank
    get_tensor_model_parallel_src_rank
    get_data_parallel_group get_data_parallel_replica_groups
    get_data_parallel_size get_data_parallel_src_rank
    get_pipeline_model_parallel_group get_pipeline_model_parallel_replica_groups
    get_pipeline_model_parallel_size
    get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank
    get_context_model_parallel_group get_context_model_parallel_replica_groups
    get_context_model_parallel_size get_context_model_parallel_rank
    get_context_model_parallel_src_tgt_pairs
    get_expert_model_parallel_group get_expert_model_parallel_replica_groups
    get_expert_model_parallel_size get_expert_model_parallel_rank
    get_expert_data_parallel_group get_expert_data_parallel_replica_groups
    get_expert_data_parallel_size get_expert_data_parallel_rank
    initialize_token_shuffle_group get_token_shuffle_group get_token_shuffle_replica_groups
    get_token_shuffle_group_size destroy_token_shuffle_group
    get_zero1_sharding_groups initialize_kv_group destroy_kv_group"""
# Module variables are here too. Scripts assign them, and the alias passes an assignment on to the
# module that the table names.
_PARALLEL_STATE_ADAPTED = """
    initialize_model_parallel get_pipeline_model_parallel_rank get_data_parallel_rank
    get_kv_shared_group get_kv_shared_replica_groups get_kv_shared_group_size
    get_pipeline_model_parallel_sr_group get_next_rank_group get_next_rank_replica_groups
    get_prev_rank_group get_prev_rank_replica_groups create_pg_with_ranks
    initialize_pp_gloo_groups get_pp_gloo_group is_tcp_store_available get_tcp_store
    gather_python_object get_rank_info_str
    _PIPELINE_MODEL_PARALLEL_GROUP_SPMD _DATA_PARALLEL_GROUP_SPMD _REPLICA_LOGIC"""
_RANK_GROUPS = """
    ParallelGroups PG_Group_Logic get_logic_chosen arrange_kv_groups
    ascending_ring_PG_group ascending_descending_ring_PG_group"""
_TENSOR_MAPPINGS = """
    copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region
    scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region"""
_MAPPINGS = f"""
    {_TENSOR_MAPPINGS}
    gather_from_tensor_model_parallel_region_with_dim
    scatter_input_channels_to_tensor_model_parallel_region
    scatter_to_sequence_parallel_region reduce_scatter_to_sequence_parallel_region
    reduce_from_context_model_parallel_region
    _split_along_first_dim _gather_along_first_dim"""
_SHARD_ATTRIBUTES = "copy_tensor_model_parallel_attributes"
_UTILS = """
    EmbeddingUtility ensure_divisibility get_padding_length
    set_tensor_model_parallel_attributes
    split_tensor_along_dim split_tensor_along_last_dim indices_split_along_dim
    param_is_not_tensor_parallel_duplicate
    set_defaults_if_not_set_tensor_model_parallel_attributes
    cast_all cast_if_autocast_enabled verify_casted_dtype
    move_all_tensor_to_cpu"""
_LAYERS = "ColumnParallelLinear RowParallelLinear ParallelEmbedding"
_GRAD_NORMS = "clip_grad_norm get_grad_norm"
_OPTIMIZER = "initialize_parallel_optimizer"
# Our ZeRO-1 knows the data-parallel group of each parameter: expert parallelism needs no other class.
_ZERO1 = "NeuronZero1Optimizer NeuronEPZero1Optimizer=NeuronZero1Optimizer"
_CONFIG = (f"{_COMPAT}.trainer", "neuronx_distributed_config initialize_parallel_model")
_SAVE = (f"{_COMPAT}.trainer", "save_checkpoint")
_CHECKPOINT = "load_checkpoint has_checkpoint finalize_checkpoint"
_PIPELINE = f"{_COMPAT}.pipeline"
_SCHEDULER = """
    PipelineTask ForwardPreprocessTask ForwardStepTask ForwardPostprocessTask
    BackwardPreprocessTask BackwardStepTask BackwardPostprocessTask PostProcessTask ReduceGradsTask
    PipeSchedule InferenceSchedule Train1F1BSchedule TrainSchedule TrainInterleavedSchedule"""
_PARTITION = """
    PipelineIO partition_traced_model analyze_pipeline_module analyze_shared_weights_across_stages
    create_partitions stage_to_pipeline_parallel_rank iterate_graph_model_outputs
    adding_live_obj_for_previous_stages
    get_pipeline_model_parallel_rank get_pipeline_model_parallel_size"""
_TRACE = """
    NxDTracer TorchTracerWrapper HFTracerWrapper get_concrete_args get_tracer_class
    patch_obj_method trace_model"""
_COMM = "send recv_from send_python_object recv_python_object rmsg"
_SERIALIZATION = """
    TensorMeta SerializationManager compress_to_string uncompress_from_string"""
_MODEL_UTILS = """
    get_delay_tracing check_delay_tracing get_model_sequential reinit_model init_on_device
    maybe_materalize_model preserve_shared_weights preserve_parallel_attributes"""
_HOOKS = (f"{_PIPELINE}.hooks", "PostPartitionHooks hooks")

# NxD's module -> [(our module, names)]. A name is written "theirs=ours" if the names differ.
# Modules without names are packages that exist for their submodules only.
_TABLE: dict[str, Sources] = {
    "": [("nxd_memopt.trainer", f"{_OPTIMIZER} {_CHECKPOINT}"), _CONFIG, _SAVE],
    "kernels": [],
    "kernels.flash_attn": [(f"{_COMPAT}.modules", "nki_flash_attn_func")],
    "kernels.ring_attention_kernel": [(f"{_COMPAT}.modules", "nki_ring_attn_func")],
    "modules": [],
    "modules.lora": [(f"{_COMPAT}.modules", "LoraConfig"), ("nxd_memopt.modules.lora", "get_lora_model")],
    "modules.lora.config": [(f"{_COMPAT}.modules", "LoraConfig")],
    "modules.moe": [(_MOE, "ACT2FN ExpertMLPs MoE RouterSinkhorn RouterTopK load_balancing_loss_func")],
    "modules.moe.expert_mlps": [(_MOE, "ExpertMLPs")],
    "modules.moe.expert_mlps_v2": [(_MOE, "ExpertMLPsV2")],
    "modules.moe.loss_function": [(_MOE, "load_balancing_loss_func")],
    "modules.moe.model": [(_MOE, "MoE")],
    "modules.moe.model_utils": [(_MOE, "ACT2FN DEFAULT_BLOCK_SIZE GLUType")],
    "modules.moe.moe_config_validator": [(_MOE, "MoeConfigValidator")],
    "modules.moe.moe_configs": [(_MOE, "BlockwiseMatmulConfig RoutedExpertsMLPOpsConfig RouterConfig")],
    "modules.moe.shared_experts": [(_MOE, "SharedExperts")],
    "modules.moe.token_shuffling": [(f"{_MOE}.token_shuffling", "token_shuffle token_unshuffle")],
    "modules.moe.routing": [(_MOE, "GroupLimitedRouter RouterBase RouterSinkhorn RouterTopK")],
    "modules.qkv_linear": [(f"{_COMPAT}.modules", "GQAQKVColumnParallelLinear")],
    "modules.rms_norm": [(f"{_COMPAT}.modules", "RMSNorm")],
    "optimizer": [("nxd_memopt.optimizer", _ZERO1)],
    "optimizer.zero_redundancy_optimizer": [("nxd_memopt.optimizer", _ZERO1)],
    "overrides": [],
    "overrides.transformer_overrides": [(f"{_COMPAT}.modules", "apply_rotary_pos_emb")],
    "parallel_layers": [
        (f"{_OURS}.checkpointing", "save load"),
        (f"{_COMPAT}.functions", "clip_grad_norm PARALLEL_FUNCTIONS PARALLEL_MODULES"),
        (f"{_COMPAT}.layers", _LAYERS),
        (f"{_COMPAT}.parallel_state", "initialize_model_parallel"),
        (
            f"{_COMPAT}.utils",
            "set_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes"
            " split_tensor_along_last_dim",
        ),
        (f"{_OURS}.loss_functions", "parallel_cross_entropy"),
        (f"{_OURS}.mappings", _TENSOR_MAPPINGS),
        (f"{_OURS}.random", "get_xla_rng_tracker model_parallel_xla_manual_seed"),
        (f"{_OURS}.utils", f"{_SHARD_ATTRIBUTES} move_model_to_device"),
    ],
    "parallel_layers.checkpointing": [(f"{_OURS}.checkpointing", "save load get_sharded_model_dict")],
    "parallel_layers.grads": [
        (f"{_COMPAT}.functions", f"{_GRAD_NORMS} bucket_allreduce_gradients allreduce_sequence_parallel_gradients")
    ],
    "parallel_layers.layer_norm": [(f"{_OURS}.layer_norm", "LayerNorm")],
    "parallel_layers.layers": [
        (
            f"{_COMPAT}.layers",
            f"{_LAYERS} BaseParallelLinear LinearWithAsyncCommunication create_local_weight"
            " linear_with_async_allreduce _initialize_parameter_cpu",
        ),
        (f"{_OURS}.mappings", "gather_from_tensor_model_parallel_region"),
        (f"{_OURS}.conv", "BaseParallelConv InputChannelParallelConv2d OutputChannelParallelConv2d"),
        (f"{_OURS}.parallel_state", "get_tensor_model_parallel_size get_tensor_model_parallel_rank"),
    ],
    "parallel_layers.loss_functions": [
        (f"{_OURS}.loss_functions", "parallel_cross_entropy from_parallel_logits_to_logprobs")
    ],
    "parallel_layers.mappings": [
        (f"{_OURS}.mappings", _MAPPINGS),
        (f"{_COMPAT}.functions", "gather_from_sequence_parallel_region"),
        (f"{_COMPAT}.utils", "split_tensor_along_dim split_tensor_along_last_dim"),
    ],
    "parallel_layers.pad": [
        (f"{_OURS}.pad", "pad_model get_number_of_extra_heads"),
        (f"{_COMPAT}.utils", "generate_padding_mask"),
    ],
    "parallel_layers.parallel_state": [
        (f"{_OURS}.parallel_state", _PARALLEL_STATE),
        (f"{_COMPAT}.parallel_state", _PARALLEL_STATE_ADAPTED),
        (f"{_COMPAT}.rank_groups", _RANK_GROUPS),
    ],
    "parallel_layers.random": [(f"{_OURS}.random", "model_parallel_xla_manual_seed get_xla_rng_tracker")],
    "parallel_layers.utils": [
        (f"{_OURS}.utils", f"{_SHARD_ATTRIBUTES} divide move_model_to_device requires_init_pg_override"),
        (f"{_COMPAT}.utils", _UTILS),
        (f"{_COMPAT}.xla.runtime", "get_local_world_size=local_process_count"),
    ],
    "pipeline": [(f"{_PIPELINE}.model", "NxDPPModel")],
    "pipeline.comm": [(f"{_PIPELINE}.comm", _COMM)],
    "pipeline.manual_pipe_stage": [(f"{_PIPELINE}.manual_pipe_stage", "PipelineStageModule")],
    "pipeline.model": [
        (
            f"{_PIPELINE}.model",
            "NxDPPModel parallel_state trace_model mark_timeline INPUTS_ARG_NAME LABLES_ARG_NAME",
        )
    ],
    "pipeline.partition": [(f"{_PIPELINE}.partition", _PARTITION)],
    "pipeline.scheduler": [(f"{_PIPELINE}.scheduler", _SCHEDULER)],
    "pipeline.timeline": [(f"{_PIPELINE}.timeline", "PPTimeline")],
    "pipeline.trace": [(f"{_PIPELINE}.trace", _TRACE)],
    "scripts": [],
    "scripts.checkpoint_converter": [(f"{_COMPAT}.checkpoint_converter", "CheckpointConverterBase")],
    "trainer": [("nxd_memopt.trainer", f"{_OPTIMIZER} load_checkpoint"), _CONFIG, _SAVE, _HOOKS],
    "trainer.checkpoint": [
        ("nxd_memopt.trainer", _CHECKPOINT),
        (f"{_COMPAT}.trainer", "save_checkpoint CheckpointIOState g_iostate"),
    ],
    "trainer.model": [("nxd_memopt.trainer", "NxDModel")],
    "trainer.optimizer": [("nxd_memopt.trainer", "NxDOptimizer")],
    "trainer.post_partition_hooks": [(f"{_PIPELINE}.hooks", "PostPartitionHooks")],
    "trainer.trainer": [("nxd_memopt.trainer", _OPTIMIZER), _CONFIG],
    "utils": [
        (f"{_COMPAT}.utils", "cpu_mode"),
        (f"{_COMPAT}.xla.model", "mark_step master_print get_device=xla_device"),
        (f"{_COMPAT}.rank_groups", "hardware"),
    ],
    "utils.activation_checkpoint": [("nxd_memopt.trainer", "apply_activation_checkpointing checkpoint_wrapper")],
    "utils.adamw_fp32_optim_params": [("nxd_memopt.optimizer", "AdamW_FP32OptimParams")],
    "utils.batch_utils": [("nxd_memopt.trainer", "get_batch_on_this_context_parallel_rank")],
    "utils.logger": [(f"{_COMPAT}.utils", "get_logger")],
    "utils.model_utils": [
        (f"{_OURS}.utils", "move_model_to_device"),
        (f"{_COMPAT}.model_utils", _MODEL_UTILS),
        (f"{_COMPAT}.utils", "LogicalNCConfig get_platform_lnc"),
        (f"{_COMPAT}.xla.runtime", "get_local_world_size=local_process_count"),
    ],
    "utils.serialization": [
        (f"{_PIPELINE}.serialization", _SERIALIZATION),
        ("nxd_memopt.trainer.loss", "find_loss_from_output_and_spec"),
    ],
    "utils.timeline": [(f"{_PIPELINE}.timeline", "Timeline")],
    "utils.utils": [(f"{_COMPAT}.rank_groups", "hardware")],
}

NAMES = build_table("neuronx_distributed", _TABLE)
"""Alias module -> alias name -> ``"our.module:name"``."""

TORCH_NEURONX = build_table("torch_neuronx", {"": [], "utils": [(f"{_COMPAT}.utils", "get_platform_target")]})
"""The name of torch_neuronx that such programs use, for machines without the package."""
