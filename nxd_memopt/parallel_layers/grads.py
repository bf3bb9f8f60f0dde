"""Owns what happens to gradients between backward and the optimizer: reductions, norm and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import is_sharded

ParameterSource = nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor]

_DEFAULT_BUCKET_BYTES = 128 << 20  # large enough for full bandwidth, small beside a model's gradients


def _parameters(source: ParameterSource) -> list[Tensor]:
    if isinstance(source, Tensor):
        return [source]
    if isinstance(source, nn.Module):
        return list(source.parameters())
    if isinstance(source, torch.optim.Optimizer):
        return [param for group in source.param_groups for param in group["params"]]
    return list(source)


def _gradient(param: Tensor) -> Tensor | None:
    """The gradient that the optimizer will use: ``main_grad`` where gradients accumulate in fp32."""
    main_grad = getattr(param, "main_grad", None)
    return param.grad if main_grad is None else main_grad


def allreduce_sequence_parallel_gradients(source: ParameterSource) -> None:
    """Sum, in place, the gradients of parameters that saw only their rank's sequence shard.

    Those are the ones tagged ``sequence_parallel_enabled``: norms and row-parallel biases. Call it once after the last
    backward of a step and before clipping. One flat collective per dtype.

    Args:
        source: a module, an optimizer or parameters.
    """
    grads = [
        grad
        for param in _parameters(source)
        if getattr(param, "sequence_parallel_enabled", False) and (grad := _gradient(param)) is not None
    ]
    _all_reduce_in_buckets(grads, parallel_state.get_tensor_model_parallel_group())


def bucket_allreduce_gradients(source: ParameterSource, *, bucket_bytes: int = _DEFAULT_BUCKET_BYTES) -> None:
    """Average, in place, gradients over the data-parallel group.

    Args:
        source: a module, an optimizer, parameters, or gradients themselves.
        bucket_bytes: upper size of one collective; a larger gradient goes alone.
    """
    tensors = _parameters(source)
    grads = [grad for t in tensors if (grad := _gradient(t) if isinstance(t, nn.Parameter) else t) is not None]
    group = parallel_state.get_data_parallel_group()
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
    for bucket in _buckets(grads, bucket_bytes):
        flat = torch.cat([grad.detach().reshape(-1) for grad in bucket])
        flat = backend.all_reduce(flat.div_(size) if average else flat, group)
        for grad, reduced in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.detach().copy_(reduced.view_as(grad))


def _buckets(grads: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Group by dtype and device, in order, up to ``bucket_bytes``."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for same_kind in by_kind.values():
        bucket: list[Tensor] = []
        filled = 0
        for grad in same_kind:
            if bucket and filled + grad.nbytes > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(grad)
            filled += grad.nbytes
        yield bucket


def get_grad_norm(source: ParameterSource, norm_type: float = 2.0) -> Tensor:
    """Norm of the whole model's gradient, in fp32 (0-dim), the same on every tensor-parallel rank.

    Shards are summed over the ranks, each replica of a shared shard counts as its fraction, and parameters that every
    rank holds count once. Call it after the reductions over sequence and data.

    Args:
        source: a module, an optimizer or parameters; those without a gradient count zero.
        norm_type: 2, any p >= 1, or infinity.

    Raises:
        ValueError: for a norm_type below 1.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type must be at least 1 or infinity, got {norm_type}")
    params = [param for param in _parameters(source) if _gradient(param) is not None]
    sharded = _local_norm([p for p in params if is_sharded(p)], norm_type)
    replicated = _local_norm([p for p in params if not is_sharded(p)], norm_type)
    group = parallel_state.get_tensor_model_parallel_group()
    if norm_type == torch.inf:
        return torch.maximum(backend.all_reduce(sharded, group, op="max"), replicated)
    return (backend.all_reduce(sharded, group) + replicated) ** (1 / norm_type)


def _local_norm(params: list[Tensor], norm_type: float) -> Tensor:
    """Maximum for infinity, otherwise the sum of p-th powers; each gradient divided among its replicas."""
    if not params:
        return torch.zeros((), device=backend.device)
    grads = [cast(Tensor, _gradient(param)).detach() for param in params]
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads, norm_type, dtype=wide)])  # pyright: ignore[reportPrivateImportUsage]
    if norm_type == torch.inf:
        return norms.nan_to_num(
            nan=torch.inf, posinf=torch.inf
        ).amax()  # a maximum over ranks may lose NaN, not infinity
    shares = norms.new_tensor([1 / getattr(param, "replicas", 1) for param in params])
    return (norms**norm_type * shares).sum()


def clip_grad_norm(source: ParameterSource, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients in place so that the whole model's norm is at most ``max_norm``.

    Args:
        source: a module, an optimizer or parameters (a generator too).
        max_norm: greatest norm allowed, above 0.
        norm_type: see ``get_grad_norm``.

    Returns:
        The norm before clipping, fp32, 0-dim; NaN or infinite where a gradient is: check it before the optimizer.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}: leave clipping out to switch it off")
    params = _parameters(source)
    total_norm = get_grad_norm(params, norm_type)
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)  # 1e-6: torch.nn.utils.clip_grad_norm_'s
    grads = [grad.detach() for param in params if (grad := _gradient(param)) is not None]
    if grads:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return total_norm
