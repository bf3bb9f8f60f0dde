"""The command ``nxd-memopt doctor``: versions, the backend and why it was chosen, and which fast paths run."""

from __future__ import annotations

from collections.abc import Sequence

from nxd_memopt._optional import MissingDependencyError, installed, require_transformers
from nxd_memopt.command_line import FlagParser

_OPTIONAL = ("triton", "flash-attn-4")


def main(arguments: Sequence[str]) -> int:
    """Print what this installation can do; return 0.

    Raises:
        ValueError: there are arguments.
    """
    FlagParser("doctor", "Show versions, the backend and why it was chosen, and which fast paths run.").parse_args(
        arguments
    )
    # Selects a backend, which may open a device.
    from nxd_memopt.ops.describe import describe_fused

    print("\n".join([*describe(), f"fused operations: {describe_fused()}", *_describe_fused_paths()]))
    return 0


def describe() -> list[str]:
    """Return versions, the backend and why it was chosen, and what it can do, without the fused operations."""
    # Importing them selects a backend, which may open a device.
    import torch

    from nxd_memopt import __version__
    from nxd_memopt.backends import BACKEND_REASON, BACKENDS, backend
    from nxd_memopt.ops.describe import describe_attention

    # In the order in which a user looks for a cause: versions, what was chosen and what would have
    # been possible. The fast paths, the longest list, come after it.
    versions = [f"nxd_memopt {__version__}", f"torch {torch.__version__}"]
    versions += installed(*_OPTIONAL)
    others = [f"  {name}: {each.unavailable_reason() or 'available'}" for name, each in BACKENDS.items()]
    kernels = backend.keep_kernels()
    return [
        ", ".join(versions),
        f"models: {_describe_models()}",
        f"backend {backend.name}: {BACKEND_REASON}",
        *others,
        f"collectives: {backend.distributed_backend}; attention: {describe_attention()}",
        *([] if kernels is None else [f"compiled kernels: {kernels}"]),
        f"float8 matmuls (trainer.fp8): {_describe_fp8()}",
        f"tensor parallelism: {backend.describe_overlap()}",
        f"data-parallel sharding: {_describe_sharding()}",
        f"host memory: {_describe_host_memory()}",
    ]


def _describe_fp8() -> str:
    """Return whether the device can train with float8 matmuls, or why not."""
    from nxd_memopt.backends import backend
    from nxd_memopt.ops.cuda.support import has_triton

    refusal = backend.fp8_refusal()
    if refusal is not None:
        return f"not available: {refusal}"
    return "available" if has_triton() else "available, but slow: the kernels of casts need Triton"


def _describe_sharding() -> str:
    """Return the ZeRO stages that the backend supports."""
    from nxd_memopt.backends import backend

    # ZeRO-1 shards optimizer states alone, which every backend can.
    refusal = backend.gradient_sharding_refusal()
    if refusal is None:
        return "zero1, zero2, zero3"
    return f"zero1; of gradients and parameters (zero2, zero3) it {refusal}"


def _describe_host_memory() -> str:
    """Return whether activations and optimizer states can be in host memory, and how much there is."""
    from nxd_memopt.backends import backend
    from nxd_memopt.memory.host_limits import available_host_bytes
    from nxd_memopt.planner.hardware import GIB

    transfers = backend.host_transfers()
    if transfers is None:
        return f"nothing is offloaded: the backend {backend.name} has no copies that overlap with its work"
    # None where neither the system nor a container's limit says it.
    available = available_host_bytes()
    size = "an unknown size"
    if available is not None:
        size = f"{available / GIB:.1f} GiB"
    # CUDA copies from page-locked memory only without waiting.
    kind = ""
    if transfers.needs_pinned_memory:
        kind = "page-locked, "
    return f"activations and optimizer states can be offloaded ({kind}{size} available)"


def _describe_fused_paths() -> list[str]:
    """Return which fused paths are on for this device, by architectures with the same; empty without transformers."""
    try:
        transformers = require_transformers("nxd_memopt.models")
    except MissingDependencyError:
        return []
    from nxd_memopt.models import MODELS, model_class

    # Families differ in a few operations only: those with the same paths share their lines.
    families: dict[tuple[str, ...], list[str]] = {}
    for model_type in MODELS:
        # One layer of small sizes on the meta device: the decisions do not depend on sizes.
        config = transformers.AutoConfig.for_model(
            model_type,
            num_hidden_layers=1,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=256,
            # The defaults are ids of a real vocabulary.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        # On trn1, where graphs have fixed shapes, a model with experts refuses the default options.
        try:
            paths = model_class(model_type)(config, device="meta").fusions.describe()
        except ValueError as error:
            paths = [f"not with the default options: {error}"]
        families.setdefault(tuple(paths), []).append(model_type)
    lines: list[str] = []
    for paths, names in families.items():
        lines += [f"fused paths of {', '.join(names)}:", *(f"  {line}" for line in paths)]
    return lines


def _describe_models() -> str:
    """Return whether the model classes can be used, which need transformers."""
    try:
        return f"available (transformers {require_transformers('nxd_memopt.models').__version__})"
    except MissingDependencyError as error:
        return f"not available: {error}"
