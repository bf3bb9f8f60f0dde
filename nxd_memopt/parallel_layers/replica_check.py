"""Warns of replicated parameters with other gradients on each tensor-parallel rank, on which they would drift apart."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.summed_gradients import gradient_of, is_sequence_parallel
from nxd_memopt.parallel_layers.utils import is_expert_parallel, is_sharded

# Elements of the sketch of a gradient: column sums of its elements in rows of this length.
SKETCH = 256
# Gradients that all ranks compute are equal up to the rounding of bf16 (0.4 %) in kernels that add in any order. Parts
# of different tokens differ by as much as they are noise, usually by more than their mean.
TOLERANCE = 0.02
# A gradient that is zero says nothing: LoRA's A has one in the first step.
STEPS = 3
_CHECKS = "replica_checks"  # attribute of a parameter: its checks so far


def warn_of_parts(params: Iterable[Tensor]) -> None:
    """Warn once, by name, of gradients that are parts of a sum. Every tensor-parallel rank calls, after backward.

    A parameter that is neither sharded nor tagged ``sequence_parallel_enabled`` has the same gradient on every
    tensor-parallel rank, unless it is applied to a sequence shard: then each rank updates it with the
    gradient of its own tokens.

    Costs one all-reduce of 2 KiB for each such parameter and one read of the device in the first step, and nothing
    later. It is left out where steps are compiled graphs (``Backend.shapes_are_static``), of which the first one
    would be another.
    """
    # A simulated world sends nothing, and a certificate's tensors have no values.
    is_simulated = dist.is_initialized() and dist.get_backend() == "fake"
    if backend.shapes_are_static or backend.is_recording or is_simulated:
        return
    # The same on all ranks, whichever parameters have a gradient there.
    checked = [param for param in params if _is_unchecked(param)]
    if not checked:
        return
    differences = _relative_differences(checked)
    wrong = []
    for param, difference in zip(checked, differences, strict=True):
        setattr(param, _CHECKS, getattr(param, _CHECKS, 0) + 1)
        # NaN is of a gradient that is zero, or not finite.
        if difference == difference:
            setattr(param, _CHECKS, STEPS)
        if difference > TOLERANCE:
            wrong.append(param)
    # Once for each stage of a pipeline, which has parameters of its own.
    if wrong and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0:
        warnings.warn(_message(wrong), stacklevel=4)


def _is_unchecked(param: Tensor) -> bool:
    is_replica = param.requires_grad and not (is_sharded(param) or is_expert_parallel(param))
    return is_replica and not is_sequence_parallel(param) and getattr(param, _CHECKS, 0) < STEPS


def _relative_differences(params: list[Tensor]) -> list[float]:
    """Return how much the gradients of the ranks differ, relative to the largest; NaN if all are zero."""
    sketches = torch.stack([_sketch(param) for param in params])  # [n, SKETCH]
    # One collective: the maximum of x is at its place, the minimum is minus the maximum of -x.
    group = parallel_state.get_tensor_model_parallel_group()
    largest, smallest = backend.all_reduce(torch.cat([sketches, -sketches]), group, op="max").chunk(2)
    range_ = (largest + smallest).norm(dim=1)
    size = torch.maximum(largest.abs(), smallest.abs()).norm(dim=1)
    return (range_ / size).tolist()


def _sketch(param: Tensor) -> Tensor:
    """Return ``SKETCH`` sums of the elements of a gradient, fp32; zeros without one."""
    grad = gradient_of(param)
    if grad is None or not grad.numel():
        return torch.zeros(SKETCH, device=backend.device)
    # Without a copy: a replicated embedding may have gigabytes.
    flat = grad.detach().flatten()
    whole = flat.numel() - flat.numel() % SKETCH
    sketch = flat[:whole].view(-1, SKETCH).sum(0, dtype=torch.float32)
    sketch[: flat.numel() - whole] += flat[whole:]
    return sketch


def _message(params: list[Tensor]) -> str:
    names = ", ".join(_name_of(param) for param in params[:5])
    more = "" if len(params) <= 5 else f" and {len(params) - 5} more"
    return (
        f"the tensor-parallel ranks have different gradients of {names}{more}, which is neither sharded nor tagged, "
        "and will drift apart: if it is applied to a sequence shard, set sequence_parallel_enabled = True on the "
        "parameter before the first backward pass; if each rank has its own rows of it, call "
        "parallel_layers.utils.set_tensor_model_parallel_attributes"
    )


def _name_of(param: Tensor) -> str:
    """Return the name of a parameter in the largest module that has it, or its shape."""
    # Optimizers do not know the names. This searches all objects, once, before a warning.
    found = ""
    for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
        for name, each in module.named_parameters():
            if each is param and len(name) > len(found):
                found = name
    return f"{found or 'a parameter'} {list(param.shape)}"
