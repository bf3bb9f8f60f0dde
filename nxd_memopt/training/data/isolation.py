"""Says how the documents of a row are isolated on this device, and what that costs."""

from __future__ import annotations

from nxd_memopt.modules.attention import CoreAttention
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.ops.attention import attention_implementation
from nxd_memopt.planner.techniques.attention_tiles import describe_tiles
from nxd_memopt.training.config.train_config import TrainConfig

_COSTS = {
    "math": "it materialises S x S scores and a mask",
    "sdpa": "one call for each document",
    "flash": "the kernel takes the bounds of documents",
    "flash4": "the kernel takes the bounds of documents",
}


def describe_isolation(model: ParallelCausalLM, config: TrainConfig) -> str:
    """Return one line about attention between documents, for the start report."""
    if not config.data.isolate_documents:
        return "documents: not isolated (data.isolate_documents is false)"
    # Isolation may select a slower kernel. The report says so, because no other line of a run would show it.
    packed, _ = _implementation(model, config, packed=True)
    plain, _ = _implementation(model, config, packed=False)
    cost = describe_tiles(config.data.seq_length) if packed == "tiled" else _COSTS[packed]
    if packed == plain:
        return f"documents: isolated in {packed} attention ({cost})"
    return (
        f"documents: isolated in {packed} attention ({cost}), instead of {plain} attention, which takes no document "
        "bounds: data.isolate_documents false uses it"
    )


def require_attention(model: ParallelCausalLM, config: TrainConfig) -> None:
    """Raise ``ValueError`` if the device cannot run ``memory.attention_backend`` on the rows of this run."""
    _implementation(model, config, packed=config.data.isolate_documents)


def _implementation(model: ParallelCausalLM, config: TrainConfig, *, packed: bool) -> tuple[str, str]:
    """Return the attention implementation of a training step on this rank's heads, and its reason."""
    cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
    # A layer with a window decides, if there is one: it has the fewest kernels.
    core = next((core for core in cores if core.window_of(config.data.seq_length)), cores[0])
    spec = model.spec
    size = config.parallel.tensor_model_parallel_size
    return attention_implementation(
        (config.data.micro_batch_size, spec.num_heads // size, config.data.seq_length, spec.head_dim),
        max(spec.num_kv_heads // size, 1),
        dtype=model.any_weight().dtype,
        packed=packed,
        dropout_p=core.dropout,
        attention_backend=core.attention_backend,
        window=core.window_of(config.data.seq_length),
    )
