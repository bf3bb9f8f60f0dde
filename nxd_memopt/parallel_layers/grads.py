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
from nxd_memopt.parallel_layers.data_shards import common_shard_group, is_data_sharded, require_replicated, row_range
from nxd_memopt.parallel_layers.replica_check import warn_of_parts
from nxd_memopt.parallel_layers.summed_gradients import (
    gradient_of,
    is_sequence_parallel,
    keep_sums,
    mark_summed,
    needs_sum,
)
from nxd_memopt.parallel_layers.utils import blocks_within, is_expert_parallel, is_sharded
from nxd_memopt.planner.techniques.buckets import GRADIENT_BUCKET_BYTES

# Elements whose squares torch's norm adds up on a CPU without losing some.
_NORM_ELEMENTS = 1 << 16

ParameterSource = nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor]


def parameters_of(source: ParameterSource) -> list[Tensor]:
    """Return the parameters of a module or an optimizer, or the given tensors, as a list."""
    if isinstance(source, Tensor):
        return [source]
    if isinstance(source, nn.Module):
        return list(source.parameters())
    if isinstance(source, torch.optim.Optimizer):
        return [param for group in source.param_groups for param in group["params"]]
    return list(source)


def allreduce_sequence_parallel_gradients(source: ParameterSource) -> None:
    """Sum, in place, the gradients of parameters that saw only this rank's sequence shard.

    These are the parameters tagged ``sequence_parallel_enabled``: norms and row-parallel biases.
    Call this function after the last backward of a step and before clipping. Gradients that are
    summed already are skipped, whether this function, an optimizer or
    ``mappings.reduce_from_tensor_model_parallel_region`` summed them, so a script and its optimizer
    may both call it. Cost: flat all-reduces of up to 128 MiB for each dtype. The first call also warns of parameters
    that are not tagged and have other gradients on each rank (``replica_check``).

    Two kinds of writes are not detected. After a sum by other means
    (``torch.distributed.all_reduce``, a flat copy), call
    ``mark_sequence_parallel_gradients_summed``. After a write that autograd does not count (the
    replay of a CUDA graph of your own), call ``torch.autograd.graph.increment_version``.

    Args:
        source: a module, an optimizer or parameters.

    Raises:
        ValueError: a gradient was modified after it was summed, so it is unknown whether it is the
            sum: another library scaled it, or another tensor took its place. Backward raises the same error
            if it adds to a sum without ``zero_grad()``.
    """
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return
    params = parameters_of(source)
    warn_of_parts(params)
    pending = [param for param in _sequence_parallel(params) if needs_sum(param)]
    sum_over_tensor_ranks([cast(Tensor, gradient_of(param)) for param in pending])
    mark_summed(pending)


def mark_sequence_parallel_gradients_summed(source: ParameterSource) -> None:
    """Declare that the script has summed the sequence-parallel gradients; optimizers then do not.

    Needed only if neither this module nor ``mappings.reduce_from_tensor_model_parallel_region``
    computed the sum. The declaration is valid until the next backward pass.

    Args:
        source: a module, an optimizer or parameters.
    """
    mark_summed(_sequence_parallel(source))


def _sequence_parallel(source: ParameterSource) -> list[Tensor]:
    """Return the tagged parameters that have a gradient."""
    return [p for p in parameters_of(source) if is_sequence_parallel(p) and gradient_of(p) is not None]


def sum_over_tensor_ranks(gradients: list[Tensor]) -> None:
    """Replace gradients by their sums over the tensor-parallel ranks; none of them may be a sum already."""
    _all_reduce_in_buckets(gradients, parallel_state.get_tensor_model_parallel_group())


def bucket_allreduce_gradients(source: ParameterSource, *, bucket_bytes: int = GRADIENT_BUCKET_BYTES) -> None:
    """Average gradients in place over the data-parallel ranks.

    All ranks need gradients of the same parameters, as in neuronx-distributed: a parameter without a gradient is left
    out, so that on ranks that differ in this, gradients of different parameters would be averaged.
    ``NeuronZero1Optimizer`` takes zeros instead.

    Expert-parallel ranks have different experts, and the gradient of an expert is that of the tokens
    of all of them already: it is summed over the expert-data-parallel group, and divided by the
    number of data-parallel ranks like all others.

    Args:
        source: a module, an optimizer, parameters, or gradients.
        bucket_bytes: maximum bytes of one collective; a larger gradient is reduced alone.

    Raises:
        ValueError: a parameter is sharded over data-parallel ranks: its gradient is an average
            already, and other ranks have other rows of it; or gradients are given under expert
            parallelism, of which is not known whether they are of experts.
    """
    tensors = parameters_of(source)
    require_replicated(tensors, "averaging gradients", "leave it out, zero3 has averaged them in backward")
    # A parameter stands for its gradient; any other tensor is a gradient itself.
    dense: list[Tensor] = []
    experts: list[Tensor] = []
    for tensor in tensors:
        is_parameter = isinstance(tensor, nn.Parameter)
        if not is_parameter and parallel_state.get_expert_model_parallel_size() > 1:
            raise ValueError(
                f"a gradient of shape {list(tensor.shape)} may be of experts, which have another group: pass parameters"
            )
        grad: Tensor | None = tensor
        if is_parameter:
            grad = gradient_of(tensor)
        if grad is None:
            continue
        if is_expert_parallel(tensor):
            experts.append(grad)
        else:
            dense.append(grad)
    size = parallel_state.get_data_parallel_size()
    group = parallel_state.get_data_parallel_group()
    average_gradients(dense, group, divisor=size, bucket_bytes=bucket_bytes)
    group = parallel_state.get_expert_data_parallel_group()
    average_gradients(experts, group, divisor=size, bucket_bytes=bucket_bytes)


def average_gradients(
    gradients: list[Tensor],
    group: ProcessGroup | None,
    *,
    divisor: int | None = None,
    bucket_bytes: int = GRADIENT_BUCKET_BYTES,
) -> None:
    """Replace tensors by their sum over ``group``, divided; every rank of it passes the same shapes.

    Args:
        gradients: gradients, or shards of them.
        group: a group of data-parallel ranks.
        divisor: default the ranks of ``group``.
        bucket_bytes: see ``bucket_allreduce_gradients``.
    """
    if divisor is None:
        divisor = backend.group_size(group)
    # An average over data ranks is linear: summed sequence-parallel gradients stay sums.
    with keep_sums(gradients):
        _all_reduce_in_buckets(gradients, group, divisor=divisor, bucket_bytes=bucket_bytes)


def _all_reduce_in_buckets(
    grads: list[Tensor], group: ProcessGroup | None, *, divisor: int = 1, bucket_bytes: int = GRADIENT_BUCKET_BYTES
) -> None:
    """Replace each gradient by its sum over ``group``, divided by ``divisor``."""
    if backend.group_size(group) == 1:
        # Experts that one data-parallel rank has are divided where they are: a bucket would copy them
        # there and back.
        if divisor > 1:
            for grad in {id(grad): grad for grad in grads}.values():
                grad.detach().div_(divisor)
        return
    for indices in bucket_indices(grads, bucket_bytes):
        # In a function of its own, so that no copy of this bucket exists while the next one is copied.
        _all_reduce_bucket([grads[i] for i in indices], group, divisor)


def _all_reduce_bucket(bucket: list[Tensor], group: ProcessGroup | None, divisor: int) -> None:
    """Replace each gradient by its sum over ``group``, divided by ``divisor``, in one collective."""
    # Flat copy of the bucket, one collective, copy back: one collective for many small
    # gradients (norm weights have H elements each).
    flat = torch.cat([grad.detach().reshape(-1) for grad in bucket])
    # Divided before the sum, so that a sum over many ranks stays within the range of fp16.
    if divisor > 1:
        flat.div_(divisor)
    flat = backend.all_reduce(flat, group)
    reduced_grads = split_sizes(flat, [grad.numel() for grad in bucket])
    for grad, reduced in zip(bucket, reduced_grads, strict=True):
        grad.detach().copy_(reduced.view_as(grad))


def bucket_indices(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Yield positions of ``tensors`` grouped by dtype and device, in order, in buckets.

    Args:
        tensors: tensors to group.
        bucket_bytes: maximum bytes of a bucket; a larger tensor is alone in its bucket.
    """
    # Only tensors of one dtype and device can be concatenated. Within a kind the order is kept,
    # so all ranks, which have the same parameters, form the same buckets.
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(i)
    for same_kind in by_kind.values():
        bucket: list[int] = []
        filled = 0
        for i in same_kind:
            if bucket and filled + tensors[i].nbytes > bucket_bytes:
                yield bucket
                bucket = []
                filled = 0
            bucket.append(i)
            filled += tensors[i].nbytes
        yield bucket


def get_grad_norm(
    source: ParameterSource, norm_type: float = 2.0, *, sharding_group: ProcessGroup | None = None
) -> Tensor:
    """Compute the norm of the full model's gradient; the result is the same on every rank of a replica.

    Norms of shards, and of the stages of a pipeline, are summed over the ranks. A shard with m
    replicas counts 1/m on each of them, and replicated parameters count once. Call this function
    after the reductions over sequence and data.

    Args:
        source: a module, an optimizer or parameters; parameters without a gradient are skipped.
        norm_type: p >= 1 (default 2), or infinity.
        sharding_group: group of ranks with different elements of every parameter (ZeRO). Default:
            the group over which the parameters are sharded (zero3), or none if every rank has all
            elements.

    Returns:
        The norm, fp32, 0-dim.

    Raises:
        ValueError: ``norm_type`` is below 1, or only some of the parameters are sharded over
            data-parallel ranks.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type must be at least 1 or infinity, got {norm_type}")
    # The copy of a tied weight on a later stage of a pipeline is counted on the first one.
    params = [p for p in parameters_of(source) if gradient_of(p) is not None and not getattr(p, "shared", False)]
    if sharding_group is None:
        # Under zero3 experts have a smaller group than all other parameters.
        sharding_group = common_shard_group(p for p in params if not is_expert_parallel(p))
    return total_norm(local_norms(params, norm_type), norm_type, sharding_group=sharding_group)


def local_norms(params: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return this rank's norms of the gradients of sharded, replicated and expert-parallel parameters.

    Returns:
        ``[3]``, fp32: the sums of p-th powers, or the maxima for p = infinity. Sums of several lists
        of parameters add up.
    """
    sharded: list[Tensor] = []
    replicated: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        if is_expert_parallel(param):
            experts.append(param)
        elif is_sharded(param):
            sharded.append(param)
        else:
            replicated.append(param)
    return torch.stack([_local_norm(kind, norm_type) for kind in (sharded, replicated, experts)])


def total_norm(norms: Tensor, norm_type: float = 2.0, *, sharding_group: ProcessGroup | None = None) -> Tensor:
    """Return the norm of the full model's gradient from ``local_norms`` of all of its parameters. Every rank calls.

    Args:
        norms: ``[3]``.
        norm_type: as of ``local_norms``.
        sharding_group: see ``get_grad_norm``; None is no group.
    """
    sharded, replicated, experts = norms.unbind()
    group = parallel_state.get_tensor_model_parallel_group()
    reduce, add = backend.all_reduce, torch.add
    if norm_type == torch.inf:
        reduce, add = _all_reduce_max, torch.maximum
    # Expert-parallel ranks have different experts. A ZeRO group has all data-parallel ranks, and so
    # all experts.
    if backend.group_size(sharding_group) == 1:
        experts = reduce(experts, parallel_state.get_expert_model_parallel_group())
    # All norms in one collective over the ZeRO group; then only the sharded parts are reduced over
    # the tensor-parallel group. All values stay on the device: no host read here.
    sharded, replicated, experts = reduce(torch.stack([sharded, replicated, experts]), sharding_group).unbind()
    total = add(reduce(add(sharded, experts), group), replicated)
    # Stages of a pipeline have different parameters.
    total = reduce(total, parallel_state.get_pipeline_model_parallel_group())
    return total if norm_type == torch.inf else total ** (1 / norm_type)


def _all_reduce_max(norms: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the maxima over ranks, NaN if one is: the maximum of gloo and NCCL may lose NaN."""
    is_nan = norms.isnan().to(norms.dtype)
    maxima, flags = backend.all_reduce(torch.stack([norms.nan_to_num(posinf=torch.inf), is_nan]), group, op="max")
    return maxima.masked_fill(flags > 0, torch.nan)


def _local_norm(params: list[Tensor], norm_type: float) -> Tensor:
    """Return the maximum norm for p = infinity, else the sum of p-th powers of the local norms.

    The gradient of a replicated shard is divided among its replicas. The result is fp32, 0-dim.
    """
    if not params:
        return torch.zeros((), device=backend.device)
    grads: list[Tensor] = []
    replicas: list[int] = []
    for param in params:
        for chunk, count in _replica_chunks(param):
            # A shard may have no rows, of which there is no maximum.
            parts = [part for part in _parts_for_norm(chunk) if part.numel()]
            grads += parts
            replicas += [count] * len(parts)
    if not grads:
        return torch.zeros((), device=backend.device)
    # One foreach call for all gradients; sums in fp32 (fp64 if a gradient is fp64).
    wide = torch.float32
    if any(grad.dtype == torch.float64 for grad in grads):
        wide = torch.float64
    local_norms = torch._foreach_norm(grads, norm_type, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    norms = torch.stack([norm.float() for norm in local_norms])
    if norm_type == torch.inf:
        return norms.amax()
    # The sum over ranks counts a shard once per replica: each of m replicas contributes 1/m.
    return (norms**norm_type / norms.new_tensor(replicas)).sum()


def _parts_for_norm(grad: Tensor) -> list[Tensor]:
    """Return parts of a gradient whose norms are exact to fp32's rounding; on a CPU they are short.

    torch adds up the squares of a CPU tensor in a few fp32 sums, which lose small addends: the norm of
    28 million elements is 1.6e-3 too small (torch 2.13).
    """
    if grad.device.type != "cpu":
        return [grad]
    return list(grad.reshape(-1).chunk(max(1, -(-grad.numel() // _NORM_ELEMENTS))))


def _replica_chunks(param: Tensor) -> list[tuple[Tensor, int]]:
    """Return the chunks of the gradient, each with its number of replicas.

    Blocks of a fused parameter (query, key, value) may have different numbers of replicas.
    """
    grad = cast(Tensor, gradient_of(param)).detach()
    blocks = getattr(param, "blocks", None)
    if not blocks:
        return [(grad, getattr(param, "replicas", 1))]
    if is_data_sharded(param):
        blocks = blocks_within(blocks, *row_range(param))
    chunks = split_sizes(grad, [block.rows for block in blocks])
    # An empty chunk adds nothing to a sum, and has no maximum.
    return [(chunk, block.replicas) for chunk, block in zip(chunks, blocks, strict=True) if chunk.numel()]


def clip_grad_norm(
    source: ParameterSource, max_norm: float, norm_type: float = 2.0, *, sharding_group: ProcessGroup | None = None
) -> Tensor:
    """Scale all gradients in place so that the norm of the full model is at most ``max_norm``.

    Args:
        source: a module, an optimizer or parameters (also a generator).
        max_norm: maximum norm, above 0.
        norm_type: see ``get_grad_norm``.
        sharding_group: see ``get_grad_norm``.

    Returns:
        The norm before clipping, fp32, 0-dim. It is NaN or infinite if a gradient is, and the scaled
        gradients are then useless: check it before the optimizer step.

    Raises:
        ValueError: ``max_norm`` is not above 0, or ``norm_type`` is below 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}: leave clipping out to switch it off")
    params = parameters_of(source)
    total_norm = get_grad_norm(params, norm_type, sharding_group=sharding_group)
    # 1e-6 and the clamp as in torch's clip_grad_norm_: the factor stays on the device, so
    # gradients are multiplied by 1 if the norm is small enough, instead of reading the norm to
    # skip this.
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    grads = [grad for param in params if (grad := gradient_of(param)) is not None]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad.detach())
    # keep_sums: scaling is linear, so a summed sequence-parallel gradient stays a sum.
    with keep_sums(grads):
        for dtype, same in by_dtype.items():
            # A factor of another dtype is rounded to this one all the same, and by a kernel a tensor that
            # is four times slower: 34 of 762 ms of LLaMA-3-8B's step with bf16 gradients (H200).
            torch._foreach_mul_(same, factor.to(dtype))  # pyright: ignore[reportPrivateImportUsage]
    return total_norm
