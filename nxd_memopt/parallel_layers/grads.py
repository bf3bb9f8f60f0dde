"""Gradients between backward and the optimizer: reductions, norm and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.gradient_ledger import gradient_of, is_sequence_parallel, keep_sums
from nxd_memopt.parallel_layers.parallel_state import gradient_ledger
from nxd_memopt.parallel_layers.utils import is_sharded

ParameterSource = nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor]

_DEFAULT_BUCKET_BYTES = 128 << 20  # large enough for full bandwidth, small beside a model's gradients


def parameters_of(source: ParameterSource) -> list[Tensor]:
    """A module's, an optimizer's, or the given ones."""
    if isinstance(source, Tensor):
        return [source]
    if isinstance(source, nn.Module):
        return list(source.parameters())
    if isinstance(source, torch.optim.Optimizer):
        return [param for group in source.param_groups for param in group["params"]]
    return list(source)


def allreduce_sequence_parallel_gradients(source: ParameterSource) -> None:
    """Sum, in place, the gradients of parameters that saw only their rank's sequence shard.

    Those are the ones tagged ``sequence_parallel_enabled``: norms and row-parallel biases. Call it after the last
    backward of a step and before clipping. A gradient that is a sum already is left alone, whether this function, an
    optimizer or ``mappings.reduce_from_tensor_model_parallel_region`` summed it, so a script and its optimizer may both
    sum. One flat collective per dtype.

    A sum made by other means (``torch.distributed.all_reduce``, a flat copy) is not seen: call
    ``mark_sequence_parallel_gradients_summed`` after it. A write that autograd does not count (the replay of a CUDA
    graph of your own) is not seen either: call ``torch.autograd.graph.increment_version`` after it.

    Args:
        source: a module, an optimizer or parameters.

    Raises:
        ValueError: a gradient was summed and then written to, so that neither this rank's part nor the sum is known to
            be in it: backward added to it without ``zero_grad()``, or a function of another library scaled it.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if backend.group_size(group) == 1:
        return
    pending = [param for param in _sequence_parallel(source) if gradient_ledger.needs_sum(param)]
    _all_reduce_in_buckets([cast(Tensor, gradient_of(param)) for param in pending], group)
    gradient_ledger.mark_summed(pending)


def mark_sequence_parallel_gradients_summed(source: ParameterSource) -> None:
    """State that the script has summed the sequence-parallel gradients itself; optimizers then do not.

    Needed only where the sum was not made by this module or by ``mappings.reduce_from_tensor_model_parallel_region``.
    It holds until the next backward pass.

    Args:
        source: a module, an optimizer or parameters.
    """
    gradient_ledger.mark_summed(_sequence_parallel(source))


def _sequence_parallel(source: ParameterSource) -> list[Tensor]:
    """The tagged parameters that have a gradient."""
    return [p for p in parameters_of(source) if is_sequence_parallel(p) and gradient_of(p) is not None]


def bucket_allreduce_gradients(source: ParameterSource, *, bucket_bytes: int = _DEFAULT_BUCKET_BYTES) -> None:
    """Average, in place, gradients over the data-parallel group.

    Args:
        source: a module, an optimizer, parameters, or gradients themselves.
        bucket_bytes: upper size of one collective; a larger gradient goes alone.
    """
    tensors = parameters_of(source)
    grads = [grad for t in tensors if (grad := gradient_of(t) if isinstance(t, nn.Parameter) else t) is not None]
    group = parallel_state.get_data_parallel_group()
    with keep_sums(grads):
        _all_reduce_in_buckets(grads, group, average=True, bucket_bytes=bucket_bytes)


def _all_reduce_in_buckets(
    grads: list[Tensor],
    group: ProcessGroup | None,
    *,
    average: bool = False,
    bucket_bytes: int = _DEFAULT_BUCKET_BYTES,
) -> None:
    size = backend.group_size(group)
    if size == 1:
        return
    for indices in bucket_indices(grads, bucket_bytes):
        bucket = [grads[i] for i in indices]
        flat = torch.cat([grad.detach().reshape(-1) for grad in bucket])
        flat = backend.all_reduce(flat.div_(size) if average else flat, group)
        for grad, reduced in zip(bucket, split_sizes(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.detach().copy_(reduced.view_as(grad))


def bucket_indices(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Group the positions of ``tensors`` by dtype and device, in order, up to ``bucket_bytes`` in each group."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(i)
    for same_kind in by_kind.values():
        bucket: list[int] = []
        filled = 0
        for i in same_kind:
            if bucket and filled + tensors[i].nbytes > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += tensors[i].nbytes
        yield bucket


def get_grad_norm(
    source: ParameterSource, norm_type: float = 2.0, *, sharding_group: ProcessGroup | None = None
) -> Tensor:
    """Norm of the whole model's gradient, in fp32 (0-dim), the same on every tensor-parallel rank.

    Shards are summed over the ranks, each replica of a shared shard counts as its fraction, and parameters that every
    rank holds count once. Call it after the reductions over sequence and data.

    Args:
        source: a module, an optimizer or parameters; those without a gradient count zero.
        norm_type: 2, any p >= 1, or infinity.
        sharding_group: each rank of it holds other elements of every parameter (ZeRO); ``None`` when each holds all.

    Raises:
        ValueError: for a norm_type below 1.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type must be at least 1 or infinity, got {norm_type}")
    params = [param for param in parameters_of(source) if gradient_of(param) is not None]
    sharded = _local_norm([p for p in params if is_sharded(p)], norm_type)
    replicated = _local_norm([p for p in params if not is_sharded(p)], norm_type)
    group = parallel_state.get_tensor_model_parallel_group()
    op = "max" if norm_type == torch.inf else "sum"
    sharded, replicated = backend.all_reduce(torch.stack([sharded, replicated]), sharding_group, op=op).unbind()
    if norm_type == torch.inf:
        return torch.maximum(backend.all_reduce(sharded, group, op="max"), replicated)
    return (backend.all_reduce(sharded, group) + replicated) ** (1 / norm_type)


def _local_norm(params: list[Tensor], norm_type: float) -> Tensor:
    """Maximum for infinity, otherwise the sum of p-th powers; each gradient divided among its replicas."""
    if not params:
        return torch.zeros((), device=backend.device)
    grads, replicas = zip(*(piece for param in params for piece in _replica_pieces(param)), strict=True)
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads, norm_type, dtype=wide)])  # pyright: ignore[reportPrivateImportUsage]
    if norm_type == torch.inf:
        return norms.nan_to_num(
            nan=torch.inf, posinf=torch.inf
        ).amax()  # a maximum over ranks may lose NaN, not infinity
    return (norms**norm_type / norms.new_tensor(replicas)).sum()


def _replica_pieces(param: Tensor) -> list[tuple[Tensor, int]]:
    """The gradient in pieces, each with the number of ranks that hold it."""
    grad = cast(Tensor, gradient_of(param)).detach()
    blocks = getattr(param, "blocks", None)
    if not blocks:
        return [(grad, getattr(param, "replicas", 1))]
    pieces = zip(split_sizes(grad, [b.rows for b in blocks]), blocks, strict=True)
    return [(piece, block.replicas) for piece, block in pieces if piece.numel()]


def clip_grad_norm(
    source: ParameterSource,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    sharding_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients in place so that the whole model's norm is at most ``max_norm``.

    Args:
        source: a module, an optimizer or parameters (a generator too).
        max_norm: greatest norm allowed, above 0.
        norm_type: see ``get_grad_norm``.
        sharding_group: see ``get_grad_norm``.

    Returns:
        The norm before clipping, fp32, 0-dim; NaN or infinite where a gradient is: check it before the optimizer.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}: leave clipping out to switch it off")
    params = parameters_of(source)
    total_norm = get_grad_norm(params, norm_type, sharding_group=sharding_group)
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)  # 1e-6: torch.nn.utils.clip_grad_norm_'s
    grads = [grad for param in params if (grad := gradient_of(param)) is not None]
    if grads:
        with keep_sums(grads):
            torch._foreach_mul_([grad.detach() for grad in grads], factor)  # pyright: ignore[reportPrivateImportUsage]
    return total_norm
