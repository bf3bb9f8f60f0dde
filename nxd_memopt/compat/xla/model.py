"""torch_xla.core.xla_model's functions over the chosen backend, executed eagerly."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from nxd_memopt.backends import backend
from nxd_memopt.compat.xla.runtime import global_ordinal, local_ordinal, world_size
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.summed_gradients import keep_sums
from nxd_memopt.parallel_layers.utils import map_tensors

RankGroups = Sequence[Sequence[int]]

REDUCE_SUM = "sum"
REDUCE_MAX = "max"
REDUCE_MIN = "min"


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return the backend's device.

    Raises:
        ValueError: ``n`` or ``devkind`` is of another device; a process has one device.
    """
    # 0 is the first device of the process, as torch_xla counts, whatever its index on the host.
    is_other = n not in (None, 0, backend.device.index)
    is_other_kind = devkind not in (None, backend.device.type.upper())
    if is_other or is_other_kind:
        raise ValueError(f"this process has the device {backend.device} alone, asked for n={n}, devkind={devkind}")
    return backend.device


def mark_step(wait: bool = False) -> None:
    """End the step; with ``wait`` wait for the device."""
    backend.mark_step()
    if wait:
        backend.synchronize()


def synchronize() -> None:
    """Wait for the device."""
    backend.synchronize()


def add_step_closure(closure: Callable[..., object], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """Call ``closure(*args)`` at once: on an eager device the values already exist."""
    del run_async
    closure(*args)


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this is rank 0 of the host, or of the world with ``local=False``."""
    ordinal = local_ordinal() if local else global_ordinal()
    return ordinal == 0


def master_print(*values: object, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Print ``values`` on rank 0 of the world, or of each host with ``local``."""
    if is_master_ordinal(local):
        print(*values, file=fd, flush=flush)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for all ranks and return the payload of each rank.

    Raises:
        ValueError: ``replicas`` is neither empty nor all ranks.
    """
    # The tag is not compared: ranks run the same program, so their calls come in the same order.
    if sorted(replicas) not in ([], list(range(parallel_state.get_world_size()))):
        raise ValueError(f"rendezvous {tag!r} of ranks {list(replicas)}: only all ranks can take part")
    if not dist.is_initialized():
        return [payload]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, payload)
    return gathered


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Return ``reduce_fn`` of the list of every rank's ``data``."""
    # weights_only: payloads of other ranks are tensors and plain containers, not code.
    stream = io.BytesIO()
    torch.save(data, stream)
    payloads = rendezvous(tag, stream.getvalue())
    return reduce_fn([torch.load(io.BytesIO(payload), weights_only=True) for payload in payloads])


def _group(groups: RankGroups | None) -> ProcessGroup | None:
    """Return this rank's process group of ``groups``, by default the world's."""
    if not dist.is_initialized():
        return None
    if groups is None:
        return dist.group.WORLD
    # group_of creates the process groups of a partition once and returns the same ones later.
    return parallel_state.group_of([list(ranks) for ranks in groups])


def all_reduce(
    reduce_type: str,
    inputs: Tensor | list[Tensor],
    scale: float = 1.0,
    groups: RankGroups | None = None,
    cctx: None = None,
    pin_layout: bool = True,
) -> Tensor | list[Tensor]:
    """Reduce over ``groups`` (default: all ranks) and multiply by ``scale``.

    A tensor gives a new tensor; a list of tensors is reduced in place and returned.
    """
    del cctx, pin_layout
    group = _group(groups)
    if isinstance(inputs, Tensor):
        return _scaled(backend.all_reduce(inputs, group, reduce_type), scale)
    # One collective per tensor. detach: the write in place must not be recorded by autograd, nor
    # be refused for a leaf that requires gradients.
    for tensor in inputs:
        reduced = backend.all_reduce(tensor.detach(), group, reduce_type)
        tensor.detach().copy_(_scaled(reduced, scale))
    return inputs


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: RankGroups | None = None, pin_layout: bool = True
) -> None:
    """Sum the gradients of ``optimizer`` over ``groups`` in place, divided by the world size.

    torch_xla divides by the world size even if ``groups`` (default: all ranks) are smaller: over
    data-parallel groups with T tensor-parallel ranks the result is the mean divided by T. It is
    the same here, so a script gives the same numbers.
    """
    # keep_sums: gradients that are already summed over sequence shards stay marked so after this
    # linear in-place write, and are not summed a second time.
    size = world_size()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params if param.grad is not None]
    if size > 1 and gradients:
        with keep_sums(gradients):
            all_reduce(REDUCE_SUM, gradients, 1.0 / size, groups, pin_layout=pin_layout)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: RankGroups | None = None,
    pin_layout: bool = True,
) -> Any:
    """Call ``reduce_gradients`` and ``optimizer.step(**optimizer_args)``; return the step's value.

    Args:
        optimizer: optimizer with gradients.
        barrier: call ``mark_step`` afterwards.
        optimizer_args: keyword arguments of ``optimizer.step``.
        groups: see ``reduce_gradients``.
        pin_layout: ignored.
    """
    reduce_gradients(optimizer, groups=groups, pin_layout=pin_layout)
    # torch_xla's optimizer_step does not clear the gradients either: scripts call zero_grad.
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    """Return ``tensor * scale``, without a kernel if ``scale`` is 1."""
    if scale == 1.0:
        return tensor
    return tensor * scale


def all_gather(
    value: Tensor, dim: int = 0, groups: RankGroups | None = None, output: None = None, pin_layout: bool = True
) -> Tensor:
    """Concatenate the group's tensors along ``dim`` in rank order."""
    del pin_layout
    if output is not None:
        raise ValueError("all_gather(output=...) is not offered: use the returned tensor")
    # The backend gathers along dimension 0, so ``dim`` is moved there and back.
    gathered = backend.all_gather(value.movedim(dim, 0), _group(groups))
    return gathered.movedim(0, dim)


def reduce_scatter(
    reduce_type: str,
    input: Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: RankGroups | None = None,
    output: None = None,
    pin_layout: bool = True,
) -> Tensor:
    """Return this rank's chunk along ``scatter_dim`` of the sum over the group, times ``scale``.

    Raises:
        ValueError: the reduction is not a sum, ``output`` is given, or ``shard_count`` is not the
            group's size.
    """
    # shard_count is redundant, but another value would give chunks of another size on torch_xla.
    del pin_layout
    group = _group(groups)
    if reduce_type != REDUCE_SUM or output is not None or shard_count != backend.group_size(group):
        raise ValueError(
            f"reduce_scatter offers sums into a new tensor over the group's {backend.group_size(group)} ranks, got "
            f"{reduce_type!r} with shard_count {shard_count}, output={output is not None}"
        )
    scattered = backend.reduce_scatter(input.movedim(scatter_dim, 0), group)
    return _scaled(scattered.movedim(0, scatter_dim), scale)


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Write ``data`` with ``torch.save``, with its tensors copied to the host.

    Rank 0 of each host writes; with ``global_master`` rank 0 of the world; without
    ``master_only`` every rank.
    """
    # As torch_xla does by default, each host writes: without a shared file system every host needs
    # the file. No barrier follows, so a reader on another rank must wait itself.
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(map_tensors(data, Tensor.cpu), file_or_path)


class ToXlaTensorArena:
    """Replaces values that ``select_fn`` selects in nested containers; ``convert_fn`` gets all of them in one list."""

    def __init__(self, convert_fn: Callable[[list[Any]], list[Any]], select_fn: Callable[[Any], bool]) -> None:
        self._convert_fn = convert_fn
        self._select_fn = select_fn

    def transform(self, inputs: Any) -> Any:
        """Return ``inputs`` with the selected values replaced."""
        selected: list[Any] = []
        self._replace(inputs, lambda value: selected.append(value))
        converted = iter(self._convert_fn(selected) if selected else [])
        return self._replace(inputs, lambda value: next(converted))

    def _replace(self, value: Any, function: Callable[[Any], Any]) -> Any:
        """Return ``value`` with ``function`` applied to the selected values, in the order of the containers."""
        if self._select_fn(value):
            return function(value)
        if isinstance(value, Mapping):
            return {key: self._replace(item, function) for key, item in value.items()}
        if isinstance(value, list | tuple):
            make: Any = getattr(type(value), "_make", type(value))  # of a named tuple
            return make([self._replace(item, function) for item in value])
        return value


def set_rng_state(seed: int, device: str | None = None) -> None:
    """Seed the device's generator with an integer, which is torch_xla's random state.

    It is not the inverse of ``get_rng_state``, which returns the generator's full state as a tensor.
    """
    del device
    backend.manual_seed(seed)


def get_rng_state(device: str | None = None) -> Tensor:
    """Return the state of the device's generator."""
    del device
    return backend.get_rng_state()
