"""The peers of the full-step benchmarks, transformers' models as users run them, and the dtype of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from scripts.bench.harness.steps import LossFunction

Builder = Callable[[Any, MemoryConfig], tuple[nn.Module, LossFunction]]


def dtype() -> torch.dtype:
    """Return the dtype of all models: fp32 on the CPU, bf16 elsewhere."""
    if backend.name == "cpu":
        return torch.float32
    return torch.bfloat16


def build_hf(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return transformers' model and its loss."""
    with backend.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype())
    _apply_hf_recompute(model, memory)
    return model, lambda ids: model(ids, labels=ids, use_cache=False).loss


def build_liger(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return transformers' model with all of Liger-Kernel's replacements, and its loss."""
    return _with_liger(config, memory)


def build_liger_grouped(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
    """Return ``build_liger`` of a model with experts, which are transformers' with ``grouped_mm``.

    Liger's own try many sizes of tiles for several minutes before the first step.
    """
    config._experts_implementation = "grouped_mm"
    return _with_liger(config, memory, swiglu=False)


def _with_liger(config: Any, memory: MemoryConfig, **options: bool) -> tuple[nn.Module, LossFunction]:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    model, loss_of = build_hf(config, memory)
    _apply_liger_kernel_to_instance(model=model, **options)  # pyright: ignore[reportArgumentType]
    return model, loss_of


def with_float8(recipe: str) -> Builder:
    """Return transformers' model with Liger's loss, whose layers are compiled and multiply in torchao's float8.

    Args:
        recipe: torchao's name, ``tensorwise`` or ``rowwise``.
    """

    def build(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        model, loss_of = _with_liger(config, memory, rope=False, swiglu=False, rms_norm=False)
        _convert_to_float8(model, recipe)
        return model, loss_of

    return with_compiled_layers(build)


def _convert_to_float8(model: nn.Module, recipe: str) -> None:
    """Let the linear layers of the decoder layers multiply in torchao's float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: ".layers." in name,
    )


def with_flash4(build: Builder) -> Builder:
    """Return ``build`` with transformers' FlashAttention-4 instead of PyTorch's attention.

    transformers' layers then copy a value from the device to the host, to see if position ids are
    of packed documents.
    """

    def build_flash4(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        config._attn_implementation = "flash_attention_4"
        return build(config, memory)

    return build_flash4


def with_torch_flash4(build: Builder) -> Builder:
    """Return ``build`` with FlashAttention-4 as PyTorch's flash attention, for layers that are compiled.

    transformers' own FlashAttention-4 divides a compiled layer in two, and float8 tensors that cross the division have
    no backward (PyTorch 2.11). The choice holds for the process: name these peers last.
    """

    def build_flash4(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA4")
        config._attn_implementation = "sdpa"
        return build(config, memory)

    return build_flash4


def with_compiled_layers(build: Builder) -> Builder:
    """Return ``build`` with each layer compiled, as in torchtitan."""

    def build_compiled(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        model, loss_of = build(config, memory)
        base: Any = model.get_submodule(str(model.base_model_prefix))
        for layer in base.layers:
            layer.compile()
        return model, loss_of

    return build_compiled


def dtensor_with_float8(recipe: str) -> Builder:
    """Return ``build_dtensor`` with compiled layers that multiply in torchao's float8, as in torchtitan.

    Args:
        recipe: torchao's name: ``tensorwise``, which gathers in float8, or ``rowwise``.
    """
    return with_compiled_layers(lambda config, memory: build_dtensor(config, memory, recipe))


def build_dtensor(config: Any, memory: MemoryConfig, float8: str | None = None) -> tuple[nn.Module, LossFunction]:
    """Return transformers' model with torchtitan's DTensor plan, and its forward and backward.

    Norms run on sequence shards, linear layers are column- and row-parallel, and the loss is
    computed from sharded logits. ``float8`` is a recipe of ``dtensor_with_float8``.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = init_device_mesh(backend.device.type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype())
    if float8 is not None:
        _convert_to_float8(model, float8)
    # The model is parallelized on the meta device, so each rank allocates its shard only.
    # Initialization and RoPE tables follow, because to_empty leaves memory undefined.
    parallelize_module(model, mesh, dtensor_plan(config, gathers_float8=float8 == "tensorwise"))
    model.to_empty(device=backend.device)
    base = model.get_submodule(model.base_model_prefix)
    base.rotary_emb = type(base.rotary_emb)(config).to(backend.device)
    # Matrices as transformers initializes them. Vectors are biases, or weights of norms.
    for name, param in model.named_parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=config.initializer_range)
        elif name.endswith("bias"):
            nn.init.zeros_(param)
        else:
            nn.init.ones_(param)
    _apply_hf_recompute(model, memory)

    def loss(ids: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), device=ids.device).unsqueeze(0)
        hidden = base(ids, position_ids=positions, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden).flatten(0, 1).float()
        # Labels are the next tokens; the last position has none (-100 is ignored).
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:].flatten()
        return F.cross_entropy(logits, labels)

    # Under loss_parallel cross_entropy computes from logits sharded along the vocabulary, without
    # an all-gather of them. Backward must run inside the context too, so this function runs it
    # and returns a detached loss.
    def step_loss(ids: Tensor) -> Tensor:
        with loss_parallel():
            value = loss(ids)
            value.backward()
        # A replicated DTensor, which plain tensors cannot be added to.
        return cast(Any, value).detach().full_tensor()

    return model, step_loss


def with_async_tp(build: Builder) -> Builder:
    """Return ``build``, whose layers are compiled, with asynchronous tensor parallelism.

    The compiler fuses collectives and matmuls through symmetric memory, from now on: name these peers last.
    """

    def build_async(config: Any, memory: MemoryConfig) -> tuple[nn.Module, LossFunction]:
        import torch._inductor.config
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(dist.group.WORLD.group_name)  # pyright: ignore[reportOptionalMemberAccess]
        return build(config, memory)

    return build_async


def _layer_styles(*, gathers_float8: bool) -> tuple[Any, Any, Any]:
    """Return the styles of a decoder layer's inputs, and of its column- and row-parallel layers."""
    if gathers_float8:
        from torchao.float8 import float8_tensor_parallel as styles  # pyright: ignore[reportMissingImports]

        return styles.PrepareFloat8ModuleInput, styles.Float8ColwiseParallel, styles.Float8RowwiseParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    return PrepareModuleInput, ColwiseParallel, RowwiseParallel


def dtensor_plan(config: Any, *, gathers_float8: bool = False) -> dict[str, Any]:
    """Return the parallel style of every module, by its name with ``*`` for layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    # Between the layers, activations are sequence shards, [B, S/T, H]: Shard(1). Row-parallel
    # layers reduce-scatter their output to that layout, and each block all-gathers its input once,
    # before the column-parallel layers. The head all-gathers too, but its logits stay sharded
    # along the vocabulary, as DTensors, for loss_parallel.
    prepared, column_style, row_style = _layer_styles(gathers_float8=gathers_float8)
    norm = SequenceParallel()
    column = column_style()
    row = row_style(output_layouts=Shard(1))
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    gather = prepared(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if config.model_type == "llama":
        # transformers' LLaMA passes hidden_states to attention by name, its GPT-NeoX by position.
        gather_attention = prepared(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        layer = {
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
            "self_attn": gather_attention,
            "mlp": gather,
        }
        layer |= dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), column)
        layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), column)
        layer |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), row)
        prefix = "model"
        outer = {"embed_tokens": embedding, "norm": norm}
    else:
        layer = {
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
            "attention": gather,
            "mlp": gather,
        }
        layer |= dict.fromkeys(("attention.query_key_value", "mlp.dense_h_to_4h"), column)
        layer |= dict.fromkeys(("attention.dense", "mlp.dense_4h_to_h"), row)
        prefix = "gpt_neox"
        outer = {"embed_in": embedding, "final_layer_norm": norm}
    plan = {f"{prefix}.{name}": style for name, style in outer.items()}
    plan |= {f"{prefix}.layers.*.{name}": style for name, style in layer.items()}
    return plan | {"lm_head": head}


def _apply_hf_recompute(model: nn.Module, memory: MemoryConfig) -> None:
    """Turn on transformers' recompute of full layers, if ``memory`` asks for it."""
    if memory.recompute_granularity == "full":
        options = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # pyright: ignore
