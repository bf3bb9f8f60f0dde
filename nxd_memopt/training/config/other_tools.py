"""Says which option stands for a name of transformers' Trainer, TRL, Axolotl, LLaMA-Factory or Lightning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nxd_memopt.options import nearest
from nxd_memopt.training.config.train_config import SECTIONS

# The nearest name by letters would mislead: --optimizer.min-lr-ratio for learning_rate.
NAMES = {
    "base_model": "model.pretrained",
    "model_name": "model.pretrained",
    "model_name_or_path": "model.pretrained",
    "tokenizer_name": "model.tokenizer",
    "dataset_name": "data.dataset",
    "dataset_path": "data.dataset",
    "datasets": "data.dataset",
    "train_file": "data.dataset",
    "validation_file": "data.validation_dataset",
    "template": "data.chat_template",
    "sequence_len": "data.seq_length",
    "max_length": "data.seq_length",
    "max_seq_length": "data.seq_length",
    "block_size": "data.seq_length",
    "cutoff_len": "data.seq_length",
    "sample_packing": "data.packing",
    "batch_size": "data.micro_batch_size and data.global_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "gradient_accumulation_steps": "data.global_batch_size, the sequences of one optimizer step",
    "learning_rate": "optimizer.lr",
    "lr_scheduler": "optimizer.lr_schedule",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "warmup_ratio": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.clip_grad",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "num_epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    "max_time": "trainer.max_steps; a signal stops a run and saves it",
    "save_steps": "trainer.save_interval",
    "eval_steps": "trainer.val_check_interval",
    "logging_steps": "trainer.log_every_n_steps",
    "save_total_limit": "trainer.keep_checkpoints",
    "resume_from_checkpoint": "trainer.resume_from",
    "bf16": "trainer.precision bf16-mixed",
    "fp16": "trainer.precision 16-mixed",
    "tf32": "trainer.allow_tf32",
    "report_to": "trainer.wandb_project",
    "gradient_checkpointing": "memory.recompute_granularity full",
    "activation_checkpointing": "memory.recompute_granularity full",
    "tensor_parallel_size": "parallel.tensor_model_parallel_size",
    "tp_size": "parallel.tensor_model_parallel_size",
    "nproc_per_node": "--nproc N of nxd-memopt train and launch",
    "num_processes": "--nproc N of nxd-memopt train and launch",
    "devices": "--nproc N of nxd-memopt train and launch",
    "num_gpus": "--nproc N of nxd-memopt train and launch",
    "deepspeed": "data_parallel.sharding",
    "fsdp": "data_parallel.sharding zero3",
    "strategy": "data_parallel.sharding",
    "adapter": "lora.lora_rank",
    "finetuning_type": "lora.lora_rank",
    "peft_type": "lora.lora_rank",
    "use_peft": "lora.lora_rank",
    "lora_r": "lora.lora_rank",
    "rank": "lora.lora_rank",
    "lora_target_modules": "lora.target_modules",
}


def meant(name: str, known: Sequence[str]) -> str:
    """Return what a name that is unknown here stands for, as the end of an error message; nothing if unclear.

    Args:
        name: an option with or without its section, such as ``learning_rate``.
        known: names that are known in its place.
    """
    option = name.rpartition(".")[2].removeprefix("--").replace("-", "_")
    if option in NAMES:
        return f": here it is {NAMES[option]}"
    # An option of this program, in another section or without its section.
    own = [
        f"{section}.{field.name}"
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
        if field.name == option
    ]
    if own:
        return f": it is {own[0]}"
    return nearest(name, known)
