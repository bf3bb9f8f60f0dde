"""One rank of a comparison: five steps of a model, from weights and data that depend on names and seeds alone.

The same program trains an example's unmodified modeling file through the alias (``--library ours``)
or on neuronx-distributed itself (``--library nxd``), and this repository's own modeling file
(``--library models``).
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
FEED_FORWARD = 96
VOCABULARY = 128
SEQUENCE = 32
BATCH = 2
EXPERTS = 4
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
FOLDERS = {
    "llama": "training/llama",
    "mixtral": "training/mixtral",
    "gpt_neox": "training/tp_dp_gpt_neox_hf_pretrain/tp_dp_gpt_neox_20b_hf_pretrain",
}


def main() -> None:
    """Train on this rank; rank 0 writes the losses as JSON."""
    options = parse()
    if options.library == "nxd":
        from nxd_on_cpu import import_neuronx_distributed

        import_neuronx_distributed(options.source / "src")
    # Example scripts ask for backend xla. Ours registers that name and replaces it with the
    # machine's own backend; for neuronx-distributed on the CPU it has to be gloo.
    dist.init_process_group({"nxd": "gloo"}.get(options.library, "xla"))
    if options.pipeline > 1:
        losses = train_stages(options)
    else:
        losses = train(options, build_model(options))
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["ours", "nxd", "models"], required=True)
    parser.add_argument("--example", choices=list(FOLDERS), required=True)
    parser.add_argument("--source", type=Path, required=True, help="checkout of neuronx-distributed")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tensor", type=int, required=True)
    parser.add_argument("--pipeline", type=int, default=1, help="P; of LLaMA on ours")
    parser.add_argument("--chunks", type=int, default=1, help="V, stages of each rank")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="the example's own: selective LLaMA, full GPT-NeoX")
    parser.add_argument("--without-hook", action="store_true", help="nxd: as its GPT-NeoX script, no hook")
    parser.add_argument("--ignored-labels", action="store_true", help="every third label is -100")
    parser.add_argument("--capacity-factor", type=float, help="of Mixtral's experts; default: no token is dropped")
    return parser.parse_args()


# Weights and data


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the full tensor ``name``, fp32, drawn from a generator seeded with its name.

    LLaMA's fused gate_up_proj consists of two tensors, and GPT-NeoX's head has its newer name, so
    all modeling files get the same weights.
    """
    name = name.replace("embed_out", "lm_head")
    if "gate_up_proj" in name:
        half = (shape[0] // 2, *shape[1:])
        return torch.cat([draw(name.replace("gate_up", part), half) for part in ("gate", "up")])
    # crc32 and not hash(): the hash of a string differs between processes.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    # Weights of norms are near 1, so that activations keep their size from layer to layer.
    if len(shape) == 1 and "norm" in name and "weight" in name:
        return 1 + 0.1 * values
    return 0.1 * values


def batches(step: int, *, data_size: int, data_rank: int, ignored_labels: bool) -> tuple[Tensor, Tensor]:
    """Return this data-parallel rank's token ids and labels of a step, ``[B, S]``, int64."""
    # Every rank draws the batch of all data-parallel ranks and takes its chunk, so a step has the
    # same data for every T.
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH * data_size, SEQUENCE), generator=generator)
    tokens = tokens.chunk(data_size)[data_rank]
    labels = tokens.clone()
    if ignored_labels:
        labels[:, ::3] = -100
    return tokens, labels


# Models


def build_model(options: argparse.Namespace) -> nn.Module:
    """Return this rank's model with its shards of the weights from ``draw``."""
    from neuronx_distributed.parallel_layers import checkpointing, parallel_state

    parallel_state.initialize_model_parallel(options.tensor, options.pipeline)
    sys.path.insert(0, str(options.source / "examples" / FOLDERS[options.example]))
    build = {"llama": build_llama, "gpt_neox": build_gpt_neox, "mixtral": build_mixtral}[options.example]
    if options.library == "models":
        build = build_own
    model = build(options)
    # The library under test shards the full weights. Buffers, such as masks and RoPE tables, are
    # in the state dict too and keep the values that the model gave them.
    full = {name: draw(name, full_shape(param)) for name, param in model.named_parameters()}
    names = set(full)
    buffers = {name: buffer for name, buffer in model.state_dict().items() if name not in names}
    if options.library == "nxd":
        full = with_sharded_experts(model, full)
    sharded = checkpointing.get_sharded_model_dict(model, full)
    if options.library == "nxd":
        mark_experts(model, is_sharded=True)
        # Its experts add the number of the rank, which they have in expert parallelism only.
        sharded = {name: value for name, value in sharded.items() if name in names}
    model.load_state_dict({**sharded, **buffers})
    return model.train()


def with_sharded_experts(model: nn.Module, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``full`` with this rank's columns of experts, ``[E, H, 2 F/T]``.

    neuronx-distributed's ``get_sharded_model_dict`` refuses to shard the last of three dimensions. The
    parameters are marked as replicated for its call.
    """
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.parallel_layers.layers import create_local_weight

    size = parallel_state.get_tensor_model_parallel_size()
    sharded = dict(full)
    for name, param in model.named_parameters():
        if is_last_of_three(param):
            stride = getattr(param, "partition_stride", 1)
            sharded[name] = create_local_weight(full[name], 2, full[name].size(2) // size, stride)
    mark_experts(model, is_sharded=False)
    return sharded


def mark_experts(model: nn.Module, *, is_sharded: bool) -> None:
    """Mark the parameters that ``with_sharded_experts`` has sharded."""
    for param in filter(is_last_of_three, model.parameters()):
        param.tensor_model_parallel = is_sharded  # pyright: ignore[reportAttributeAccessIssue]


def is_last_of_three(param: Tensor) -> bool:
    """Return whether a parameter is sharded along the last of three dimensions."""
    return getattr(param, "partition_dim", None) == 2


def full_shape(param: Any) -> tuple[int, ...]:
    """Return the shape of the full tensor of a sharded parameter."""
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= param.num_partitions
    return tuple(shape)


def build_llama(options: argparse.Namespace) -> nn.Module:
    """Return the LLaMA of the example."""
    from modeling_llama_nxd import CoreAttention, LlamaForCausalLM
    from neuronx_distributed.utils.activation_checkpoint import apply_activation_checkpointing
    from transformers import LlamaConfig

    sizes = {**llama_sizes(), "num_hidden_layers": options.layers}
    # Stages return tuples, as the example's script of stages has it.
    config: Any = LlamaConfig(**sizes, use_cache=False, return_dict=options.pipeline == 1)
    config.torch_dtype = torch.float32
    config.sequence_parallel_enabled = options.tensor > 1
    config.selective_checkpoint_enabled = options.recompute
    config.transpose_nki_inputs = False
    model = LlamaForCausalLM(config)
    if options.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, CoreAttention))
    return model


def build_gpt_neox(options: argparse.Namespace) -> nn.Module:
    """Return the GPT-NeoX of the example."""
    from modeling_gpt_neox_nxd import GPTNeoXForCausalLMNxD
    from transformers import GPTNeoXConfig

    config: Any = GPTNeoXConfig(**gpt_neox_sizes(), use_cache=False)
    config.sequence_parallel_enabled = options.tensor > 1
    model: Any = GPTNeoXForCausalLMNxD(config)
    if options.recompute:
        model.gradient_checkpointing_enable()
    return model


def build_mixtral(options: argparse.Namespace) -> nn.Module:
    """Return the Mixtral of the example, with its balancing loss."""
    from modeling_mixtral_moe_nxd import MixtralForCausalLM
    from transformers import MixtralConfig

    config: Any = MixtralConfig(
        **llama_sizes(),
        use_cache=False,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    )
    # What its script adds to the configuration.
    config.capacity_factor = options.capacity_factor
    config.sequence_parallel_enabled = options.tensor > 1
    config.selective_checkpoint_enabled = False
    config.moe_frequency = config.pretraining_tp = config.kv_shared_group_size = 1
    config.qkv_linear = config.use_flash_attention = False
    return MixtralForCausalLM(config)


def build_own(options: argparse.Namespace) -> nn.Module:
    """Return this repository's model of the same sizes."""
    from transformers import GPTNeoXConfig, LlamaConfig

    from nxd_memopt.config import MemoryConfig, ParallelConfig
    from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
    from nxd_memopt.models.llama import LlamaForCausalLM

    parallel = ParallelConfig(
        tensor_model_parallel_size=options.tensor,
        sequence_parallel_enabled=options.tensor > 1,
    )
    memory = MemoryConfig()
    if options.recompute:
        memory = MemoryConfig(recompute_granularity="full")
    if options.example == "llama":
        sizes = {**llama_sizes(), "num_hidden_layers": options.layers}
        return LlamaForCausalLM(LlamaConfig(**sizes), parallel=parallel, memory=memory)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**gpt_neox_sizes()), parallel=parallel, memory=memory)


def llama_sizes() -> dict[str, Any]:
    """Return the options of LLaMA's configuration."""
    return {
        **_sizes(),
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def gpt_neox_sizes() -> dict[str, Any]:
    """Return the options of GPT-NeoX's configuration."""
    return {**_sizes(), "rotary_pct": 0.25, "layer_norm_eps": 1e-5, "tie_word_embeddings": False}


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": SEQUENCE,
    }


# Optimizers, as the example's training script has them


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of the example's script: no weight decay for biases and norms."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        if "bias" in name or "norm" in name:
            undecayed.append(param)
        else:
            decayed.append(param)
    return [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": undecayed, "weight_decay": 0.0},
    ]


def build_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the example's script builds."""
    from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams

    groups = parameter_groups(model)
    if options.library == "nxd":
        adamw = AdamW_FP32OptimParams(groups, lr=LEARNING_RATE)
        return without_zero1(adamw, hook=not options.without_hook)
    # The models of this repository are trained with the optimizer of the example too.
    if options.example in ("llama", "mixtral"):
        return zero1_of_the_trainer(groups, AdamW_FP32OptimParams)
    return zero1_itself(groups, AdamW_FP32OptimParams)


def without_zero1(adamw: torch.optim.Optimizer, *, hook: bool) -> torch.optim.Optimizer:
    """Return neuronx-distributed's optimizer without ZeRO-1, which supports XLA tensors only.

    Args:
        adamw: base optimizer.
        hook: sum sequence-parallel gradients over tensor-parallel ranks.
    """
    from neuronx_distributed.trainer.optimizer import NxDOptimizer

    # ``sequence_parallel`` makes NxDOptimizer sum the sequence-parallel gradients before clipping.
    # ZeRO-1 changes where states are, not their values, so losses stay comparable without it.
    clip = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": MAX_NORM}
    return NxDOptimizer(adamw, {"optimizer_config": clip, "sequence_parallel": hook})


def zero1_of_the_trainer(groups: list[dict[str, Any]], optimizer_class: Any) -> torch.optim.Optimizer:
    """Return ZeRO-1 from the trainer functions, as LLaMA's script builds it."""
    import neuronx_distributed as nxd
    from neuronx_distributed.parallel_layers import parallel_state

    size = parallel_state.get_tensor_model_parallel_size()
    zero1 = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": MAX_NORM}
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=size,
        pipeline_parallel_size=parallel_state.get_pipeline_model_parallel_size(),
        optimizer_config=zero1,
        sequence_parallel=size > 1,
    )
    return nxd.initialize_parallel_optimizer(config, optimizer_class, groups, lr=LEARNING_RATE)


def zero1_itself(groups: list[dict[str, Any]], optimizer_class: Any) -> torch.optim.Optimizer:
    """Return ZeRO-1 from its constructor, as GPT-NeoX's script builds it."""
    from neuronx_distributed.optimizer import NeuronZero1Optimizer
    from neuronx_distributed.parallel_layers import parallel_state

    return NeuronZero1Optimizer(
        groups,
        optimizer_class,
        lr=LEARNING_RATE,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_replica_groups(),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
    )


# Training


def train(options: argparse.Namespace, model: nn.Module) -> list[float]:
    """Return the loss before each step, mean over data-parallel ranks."""
    from neuronx_distributed.parallel_layers import parallel_state

    optimizer = build_optimizer(options, model)
    group = parallel_state.get_data_parallel_group()
    data_size = parallel_state.get_data_parallel_size()
    losses: list[float] = []
    for step in range(options.steps):
        tokens, labels = batches(
            step,
            data_size=data_size,
            data_rank=parallel_state.get_data_parallel_rank(),
            ignored_labels=options.ignored_labels,
        )
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Tensor-parallel ranks have the same loss; data-parallel ranks have that of their chunk.
        # The gradients' mean over data-parallel ranks is the optimizer's task.
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / data_size)
    return losses


def train_stages(options: argparse.Namespace) -> list[float]:
    """Return the losses of LLaMA in stages, with the options of the example's script, one row per micro-batch."""
    import neuronx_distributed as nxd
    from neuronx_distributed.parallel_layers import mappings, parallel_state

    sys.path.insert(0, str(options.source / "examples" / FOLDERS[options.example]))
    from modeling_llama_nxd import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    stages = {
        "transformer_layer_cls": LlamaDecoderLayer,
        "num_microbatches": BATCH,
        "virtual_pipeline_size": options.chunks,
        "output_loss_value_spec": (True, False),
        "input_names": ["input_ids", "attention_mask", "labels"],
        "auto_partition": True,
        "leaf_module_cls": [LlamaRMSNorm.__name__, LlamaRotaryEmbedding.__name__],
        "autowrap_modules": [mappings],
        "use_optimizer_wrapper": True,
        "deallocate_pipeline_outputs": True,
        "broadcast_and_average_loss": True,
    }
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=options.tensor,
        pipeline_parallel_size=options.pipeline,
        pipeline_config=stages,
        activation_checkpoint_config="full" if options.recompute else None,
    )
    model = nxd.initialize_parallel_model(config, lambda: build_model(options))
    optimizer = build_optimizer(options, model)
    data_size = parallel_state.get_data_parallel_size()
    losses: list[float] = []
    for step in range(options.steps):
        tokens, labels = batches(
            step,
            data_size=data_size,
            data_rank=parallel_state.get_data_parallel_rank(),
            ignored_labels=options.ignored_labels,
        )
        mask = torch.ones_like(tokens)
        losses.append(model.run_train(input_ids=tokens, attention_mask=mask, labels=labels).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    main()
