"""Cuts and joins tensors for ``CheckpointConverterBase``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nxd_memopt.checkpoint.nxd.parts import Kind, Layout
from nxd_memopt.ops.parts import split_sizes
from nxd_memopt.parallel_layers.utils import bit_equal


def cut_slice(full: Tensor, dim: int, index: int, count: int, name: str) -> Tensor:
    """Return a contiguous copy of slice ``index`` of ``count`` equal slices along ``dim``.

    Raises:
        ValueError: ``count`` does not divide the dimension.
    """
    if full.size(dim) % count:
        raise ValueError(
            f"dimension {dim} of {name}, {full.size(dim)}, is not divisible by {count} ranks: use another size"
        )
    # A copy: torch.save of a view would write the storage of the full tensor.
    length = full.size(dim) // count
    return full.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)


def fuse_gate_up(state: Mapping[str, Tensor], dim_of: Callable[[str], int]) -> dict[str, Tensor]:
    """Return ``state`` with each gate_proj and up_proj concatenated to a gate_up_proj, gate first.

    Raises:
        ValueError: one of the two is missing.
    """
    # Gate and up of a layer give the same fused name, so the second of them writes an equal entry
    # again. Both must be checked: a model without one of them would lose the other silently.
    fused: dict[str, Tensor] = {}
    for name, value in state.items():
        if "gate_proj" in name:
            token = "gate_proj"
        elif "up_proj" in name:
            token = "up_proj"
        else:
            fused[name] = value
            continue
        gate = name.replace(token, "gate_proj")
        up = name.replace(token, "up_proj")
        for required in (gate, up):
            if required not in state:
                raise ValueError(f"the state dict has {name} but not {required}: gate_up_proj is made of both")
        fused[name.replace(token, "gate_up_proj")] = torch.cat([state[gate], state[up]], dim_of(name))
    return fused


def pad_to_multiple(shard: Tensor, dim: int, width: int, factor: int, name: str) -> Tensor:
    """Return ``shard`` padded with zeros along ``dim`` to a multiple of ``factor``.

    Raises:
        ValueError: ``shard`` has not ``width`` elements along ``dim``: the inverse conversion
            removes padding down to ``width``.
    """
    if shard.size(dim) != width:
        raise ValueError(
            f"{name} has {shard.size(dim)} elements on each rank, ffn_hidden_size over tp_size gives {width}: "
            "--i_tp_round_factor pads all MLPs of a model, which must be of one width"
        )
    # The padding of gate and up gives activations of 0, and the padding of down multiplies them
    # by 0: the padded MLP has the same output.
    shape = list(shard.shape)
    shape[dim] = -(-width // factor) * factor
    padded = shard.new_zeros(shape)
    padded.narrow(dim, 0, width).copy_(shard)
    return padded


def unfuse_qkv(state: Mapping[str, Tensor], heads: tuple[int, int], fused_key: str) -> dict[str, Tensor]:
    """Return ``state`` with fused parameters split into ``weight_q``, ``weight_k``, ``weight_v``.

    Args:
        state: state dict of one rank.
        heads: numbers of query heads and of KV heads with replicas, on all ranks. A rank's rows
            have the same ratio.
        fused_key: last two parts of the fused parameter's name.
    """
    separate: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.endswith(fused_key):
            separate[name] = value
            continue
        for letter, part in zip("qkv", split_heads(value, heads, 0), strict=True):
            separate[f"{name.removesuffix(fused_key)}qkv_proj.weight_{letter}"] = part
    return separate


def split_heads(fused: Tensor, heads: tuple[int, int], dim: int) -> tuple[Tensor, ...]:
    """Return query, key and value of a rank's fused weight or bias, which are consecutive along ``dim``.

    Args:
        fused: the rank's rows of query heads, then of its KV heads of K, then of V.
        heads: numbers of query heads and of KV heads with replicas, on all ranks. A rank's rows have the same ratio.
        dim: dimension of the heads.
    """
    query, kv = heads
    return split_sizes(fused, [fused.size(dim) * count // (query + 2 * kv) for count in (query, kv, kv)], dim)


def order_slices(name: str, shards: Sequence[Tensor], layout: Layout, kind: Kind) -> list[Tensor]:
    """Return the distinct slices of the ranks' shards, in the order of the full tensor.

    Raises:
        ValueError: ranks that must have the same slice have different ones.
    """
    # Replicas of a KV head must be bit-equal; the first of them is taken.
    slices: dict[int, Tensor] = {}
    for rank, shard in enumerate(shards):
        index, _ = layout.slice_index(kind, rank)
        first = slices.setdefault(index, shard)
        if first is not shard and not bit_equal(first, shard):
            raise ValueError(
                f"{name} of tensor-parallel rank {rank} differs from that of the rank with the same KV heads in "
                f"{layout.kv_order} order: pass the other --hw_backend, or check that the files are of one save"
            )
    return [slices[index] for index in range(len(slices))]
