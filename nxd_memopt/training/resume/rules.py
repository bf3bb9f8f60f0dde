"""Says for each option of the training program whether a resumed run may change it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from nxd_memopt.training.config.moe import MoEOptions


class Change(Enum):
    """What happens if an option of a resumed run differs from the checkpoint's."""

    NOT_COMPARED = "not recorded: it says where files are, or how this process runs"
    REPORTED = "may change: neither the losses nor the trained sequences depend on it; one line says so"
    SAME_CONTENT = "a name or a path that may change if it leads to equal content; one line says so"
    SAME_CONFIG = "a model's directory that may change if its configuration is equal; one line says so"
    WHEN_ASKED = "changes the results: allowed if named in trainer.allow_changes"
    REFUSED = "changes what the stored state means"
    SPECIAL = "compared by a function of its own, in changes.py or plan.py"


@dataclass(frozen=True)
class Rule:
    """Rule of one option.

    Args:
        change: what happens if the option changes.
        remedy: for ``REFUSED``: what to do instead.
    """

    change: Change
    remedy: str = ""


NEW_RUN = "start a new run in another trainer.output_dir"
WARM_START = f"{NEW_RUN}, with these weights: --model.warm-start DIR"

NOT_COMPARED = Rule(Change.NOT_COMPARED)
REPORTED = Rule(Change.REPORTED)
SAME_CONTENT = Rule(Change.SAME_CONTENT)
WHEN_ASKED = Rule(Change.WHEN_ASKED)
SPECIAL = Rule(Change.SPECIAL)
REFUSED = Rule(Change.REFUSED, WARM_START)

# Options of MoE layers that only decide how and where the same values are computed, or what is written.
MOE_REPORTED = ("moe_token_dispatcher_type", "moe_per_layer_logging", "moe_layer_recompute")
MOE_SHAPE = (
    "num_moe_experts",
    "moe_router_topk",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
MOE_RESULTS = tuple(field.name for field in fields(MoEOptions) if field.name not in (*MOE_REPORTED, *MOE_SHAPE))

RULES: dict[str, Rule] = {
    # The weights come from the checkpoint, so a pretrained directory stands for its configuration
    # and its tokenizer only. Sizes and everything else in config.json are compared one by one. With
    # adapters, find_adapter_base compares the weights of the base.
    "model.pretrained": Rule(Change.SAME_CONFIG),
    "model.tokenizer": SAME_CONTENT,
    "model.config_overrides": SPECIAL,
    "model.random_init": NOT_COMPARED,
    "model.resize_embedding": NOT_COMPARED,  # vocab_size, which follows from it, is compared
    "model.warm_start": NOT_COMPARED,
    "model.dtype": REFUSED,
    "parallel.tensor_model_parallel_size": REPORTED,
    "parallel.sequence_parallel_enabled": REPORTED,
    "parallel.expert_model_parallel_size": REPORTED,
    "parallel.reduce_dtype": WHEN_ASKED,
    "parallel.use_cpu_initialization": NOT_COMPARED,
    # Memory techniques compute the same values.
    "memory.recompute_granularity": REPORTED,
    "memory.recompute_method": REPORTED,
    "memory.recompute_num_layers": REPORTED,
    "memory.recompute_modules": REPORTED,
    "memory.recompute_keep_core_attn": REPORTED,
    "memory.recompute_keep_core_attn_num_layers": REPORTED,
    "memory.cpu_offloading": REPORTED,
    "memory.cpu_offloading_num_layers": REPORTED,
    "memory.cpu_offloading_weights": REPORTED,
    "memory.cpu_offloading_activations": REPORTED,
    "memory.mlp_tile_tokens": REPORTED,
    "memory.attention_head_groups": REPORTED,
    "memory.attention_backend": REPORTED,
    "memory.fused_linear_cross_entropy": REPORTED,
    "memory.selective_activation_checkpointing_is_enabled": REPORTED,
    # What ranks share does not change what they compute, nor what a checkpoint stores.
    "data_parallel.sharding": REPORTED,
    "data_parallel.num_distributed_optimizer_instances": REPORTED,
    "data_parallel.reshard_after_forward": REPORTED,
    "data_parallel.grad_reduce_in_fp32": WHEN_ASKED,
    # The model's part of these is compared as its architecture too.
    **{f"moe.{name}": WHEN_ASKED for name in MOE_RESULTS},
    **{f"moe.{name}": REPORTED for name in MOE_REPORTED},
    **{f"moe.{name}": Rule(Change.REFUSED, NEW_RUN) for name in MOE_SHAPE},
    # Adapters are part of the model's shape; the scale and dropout are of its forward.
    "lora.lora_rank": REFUSED,
    "lora.target_modules": REFUSED,
    "lora.lora_alpha": REFUSED,
    "lora.use_rslora": REFUSED,
    "lora.lora_dropout": WHEN_ASKED,
    "lora.init_lora_weights": NOT_COMPARED,
    # The position in the data is a number of sequences: whatever determines the sequences and
    # their order must stay. Paths and columns may change where the tokens are the same.
    "data.dataset": SAME_CONTENT,
    "data.mixture": REFUSED,
    "data.dataset_config": SAME_CONTENT,
    "data.split": SAME_CONTENT,
    "data.format": REFUSED,
    "data.text_column": SAME_CONTENT,
    "data.chat_template": SAME_CONTENT,
    "data.train_on_input": REFUSED,
    "data.long_conversations": REFUSED,
    "data.on_bad_rows": SAME_CONTENT,
    "data.streaming": SAME_CONTENT,
    "data.end_of_text": SAME_CONTENT,
    "data.seq_length": REFUSED,
    "data.packing": REFUSED,
    "data.isolate_documents": WHEN_ASKED,
    "data.held_out_every": Rule(Change.REFUSED, f"{WARM_START} (auto is 0 with data.eval_sequences 0)"),
    "data.validation_dataset": SAME_CONTENT,
    "data.micro_batch_size": REPORTED,
    "data.global_batch_size": WHEN_ASKED,
    "data.eval_sequences": REPORTED,
    "optimizer.lr": WHEN_ASKED,
    "optimizer.lr_schedule": WHEN_ASKED,
    "optimizer.wsd_decay_steps": WHEN_ASKED,
    "optimizer.min_lr_ratio": WHEN_ASKED,
    "optimizer.warmup_steps": WHEN_ASKED,
    "optimizer.decay_steps": SPECIAL,
    "optimizer.constant_steps": NOT_COMPARED,  # the step at which the decay ends follows from it
    "optimizer.weight_decay": WHEN_ASKED,
    # Checkpoints have the states by group.
    "optimizer.no_decay": REFUSED,
    "optimizer.do_layer_norm_weight_decay": REFUSED,
    "optimizer.lr_multipliers": REFUSED,
    "optimizer.betas": WHEN_ASKED,
    "optimizer.eps": WHEN_ASKED,
    "optimizer.clip_grad": WHEN_ASKED,
    "optimizer.master_weights": REFUSED,
    # The same updates at another time.
    "optimizer.in_backward": REPORTED,
    # A state's place does not change its value.
    "optimizer.optimizer_cpu_offload": REPORTED,
    "optimizer.optimizer_offload_fraction": REPORTED,
    "optimizer.optimizer_staging_gib": REPORTED,
    "optimizer.store_param_remainders": REPORTED,
    "optimizer.optimizer_update_in_forward": REPORTED,
    # The scale itself comes from the checkpoint.
    "optimizer.initial_loss_scale": REPORTED,
    "optimizer.min_loss_scale": WHEN_ASKED,
    "optimizer.loss_scale_window": WHEN_ASKED,
    "optimizer.hysteresis": WHEN_ASKED,
    # The stage, which follows from it, is compared.
    "optimizer.zero1": NOT_COMPARED,
    "optimizer.overlap_grad_reduce": REPORTED,
    "trainer.output_dir": NOT_COMPARED,
    "trainer.resume_from": NOT_COMPARED,
    "trainer.allow_changes": NOT_COMPARED,
    "trainer.on_schedule_change": NOT_COMPARED,
    "trainer.max_steps": REPORTED,
    "trainer.max_epochs": NOT_COMPARED,  # replaced by max_steps
    "trainer.seed": REFUSED,
    "trainer.val_check_interval": REPORTED,
    "trainer.save_interval": REPORTED,
    "trainer.save_checkpoints": REPORTED,
    "trainer.async_save": REPORTED,
    "trainer.keep_checkpoints": REPORTED,
    "trainer.log_every_n_steps": REPORTED,
    "trainer.export": REPORTED,
    "trainer.verify_export": REPORTED,
    "trainer.enable_cuda_graph": REPORTED,
    "trainer.compile": REPORTED,
    # model.dtype and optimizer.master_weights, which follow from it, are compared.
    "trainer.precision": NOT_COMPARED,
    "trainer.allow_tf32": WHEN_ASKED,
    "trainer.distributed_timeout_minutes": NOT_COMPARED,
    "trainer.wandb_project": NOT_COMPARED,
    "trainer.auto_memory": NOT_COMPARED,
    "launch.neuron_cc_flags": REPORTED,
    "launch.compile_cache_dir": NOT_COMPARED,
}

# Options of the model that may change if asked for. All others are its shape, or constants of its
# forward that the weights were trained with.
ARCHITECTURE_WHEN_ASKED = ("attention_dropout", "hidden_dropout")

# Those of its shape, with which no weights of another shape start.
ARCHITECTURE_SHAPE = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "shared_expert_intermediate_size",
    "vocab_size",
)

# Entries of a Hugging Face configuration that no training step depends on. The ids of the end and
# the beginning of a text are part of the tokens, whose content is compared; the row of pad_token_id in
# LLaMA's embedding gets no gradient, so that one counts.
NOT_ARCHITECTURE = {
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def options_when_asked() -> list[str]:
    """Return the names that ``trainer.allow_changes`` accepts."""
    # data.dataset allows other content, not only another path. data.micro_batch_size is asked for with experts.
    names = [name for name, rule in RULES.items() if rule.change is Change.WHEN_ASKED]
    return [
        *names,
        "data.micro_batch_size",
        "data.dataset",
        "optimizer.decay_steps",
        *(f"model.config_overrides.{name}" for name in ARCHITECTURE_WHEN_ASKED),
    ]
