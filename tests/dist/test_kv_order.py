"""KV replicas, query heads and output projections on trn1's ranks: layers against one process and NxD's layout."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.modules import qkv_linear
from nxd_memopt.parallel_layers import checkpointing, grads, layers, parallel_state
from nxd_memopt.parallel_layers.output_projection import describe_output_projections
from nxd_memopt.parallel_layers.utils import shard_ranges
from tests.alias_modules import import_without_alias
from tests.dist.pool import SEED, distributed
from tests.reference import (
    assert_float64_close,
    assert_says,
    error_message,
    from_all_ranks,
    laid_out_as,
    shard,
    tensors,
)
from tests.reference_models import (
    gathered,
    local_part,
)

compat_layers = import_without_alias("layers")
compat_modules = import_without_alias("modules")

HEAD, HIDDEN, HEADS, KV_HEADS = 3, 10, 8, 2


def initialize(size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


# Groups


@distributed(world_size=4, slow=[8])
def test_groups_of_each_platform(world_size):
    apart = {4: [[0, 2], [1, 3]], 8: [[0, 2, 4, 6], [1, 3, 5, 7]]}[world_size]
    with laid_out_as("trn1"):
        initialize(world_size)
        group = parallel_state.initialize_kv_group(world_size // 2)
        assert parallel_state.get_kv_shared_group(world_size // 2, as_list=True) == apart
        assert parallel_state.kv_rank_strides() == {world_size // 2: 2}
        parity = sum(range(dist.get_rank() % 2, world_size, 2))
        assert backend.all_reduce(torch.tensor(dist.get_rank()), group).item() == parity
    parallel_state.destroy_model_parallel()
    with laid_out_as("trn2"):
        initialize(world_size)
        parallel_state.initialize_kv_group(world_size // 2)
        half = world_size // 2
        assert parallel_state.get_kv_shared_group(half, as_list=True) == [
            list(range(half)),
            list(range(half, world_size)),
        ]


@distributed(world_size=4)
def test_sequential_groups_on_trn1():
    """neuronx-distributed's argument: the layers that are built afterwards follow the groups."""
    with laid_out_as("trn1"):
        initialize(4)
        parallel_state.initialize_kv_group(2, sequential_ranks_in_group=True)
        assert parallel_state.get_kv_shared_group(2, as_list=True) == [[0, 1], [2, 3]]
        layer = qkv_linear.GQAQKVColumnParallelLinear(HIDDEN, [24, 6], kv_size_multiplier=2, gather_output=False)
        assert (layer.rank_stride, layer.weight_k.partition_index) == (1, dist.get_rank() // 2)
        parallel_state.destroy_kv_group()
        parallel_state.initialize_kv_group(2)
        message = error_message(lambda: parallel_state.initialize_kv_group(2, sequential_ranks_in_group=True))
        assert_says(message, "size 2", "2 apart", "destroy_kv_group")


# One attention block, as neuronx-distributed's LLaMA builds it: its output projection is told nothing of the order


class Attention(nn.Module):
    """``[S, B, H] -> [S, B, H]`` in float64, of this library's layers or of the alias's."""

    def __init__(self, names: str, *, fuse_qkv: bool, sequence_parallel: bool, heads: int, kv_heads: int) -> None:
        super().__init__()
        multiplier = qkv_linear.kv_size_multiplier(kv_heads, parallel_state.get_tensor_model_parallel_size())
        qkv, row = {
            "ours": (qkv_linear.GQAQKVColumnParallelLinear, layers.RowParallelLinear),
            "alias": (compat_modules.GQAQKVColumnParallelLinear, compat_layers.RowParallelLinear),
        }[names]
        options = {"bias": False, "dtype": torch.float64, "reduce_dtype": torch.float64}
        options["sequence_parallel_enabled"] = sequence_parallel
        sizes = [heads * HEAD, kv_heads * HEAD]
        self.qkv_proj = qkv(
            HIDDEN, sizes, gather_output=False, kv_size_multiplier=multiplier, fuse_qkv=fuse_qkv, **options
        )
        self.o_proj = row(heads * HEAD, HIDDEN, input_is_parallel=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(attend(*self.qkv_proj(x)))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[S, B, heads * d]`` each; query heads are shared out evenly over the KV heads that are given, in order."""
    query, key, value = (x.unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for x in (query, key, value))
    group = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3).flatten(-2)


def full_weights(heads: int, kv_heads: int) -> dict[str, Tensor]:
    shapes = {"q": (heads * HEAD, HIDDEN), "k": (kv_heads * HEAD, HIDDEN), "v": (kv_heads * HEAD, HIDDEN)}
    shapes["o"] = (HIDDEN, heads * HEAD)
    return {name: tensors(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def by_parameter(weights: dict[str, Tensor], *, fuse_qkv: bool) -> dict[str, Tensor]:
    named = {f"qkv_proj.weight_{name}": weights[name] for name in "qkv"}
    if fuse_qkv:
        named = {"qkv_proj.weight_qkv": torch.cat(list(named.values()))}
    return {**named, "o_proj.weight": weights["o"]}


def build(names: str, *, fuse_qkv: bool, sequence_parallel: bool = False, heads: int = HEADS, kv_heads: int = KV_HEADS):
    """The block with this rank's slices of ``full_weights``, and those by parameter name."""
    block = Attention(names, fuse_qkv=fuse_qkv, sequence_parallel=sequence_parallel, heads=heads, kv_heads=kv_heads)
    full = by_parameter(full_weights(heads, kv_heads), fuse_qkv=fuse_qkv)
    block.load_state_dict(checkpointing.get_sharded_model_dict(block, full))
    return block, full


def dense_step(weights: dict[str, Tensor], x: Tensor, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradients of x and of each weight, in one process."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in {**weights, "x": x}.items()}
    query, key, value = (leaves["x"] @ leaves[name].t() for name in "qkv")
    output = attend(query, key, value) @ leaves["o"].t()
    output.backward(upstream)
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}


# 8 query heads: 2 or 1 on a rank; 2 KV heads on 4 and on 8 ranks
@distributed(world_size=4, slow=[8])
@pytest.mark.parametrize("order", ["trn1", "trn2"])
@pytest.mark.parametrize("names", ["ours", "alias"])
def test_attention_equals_one_process(names, order, world_size):
    """Output, every gradient, and the gradient's norm; fused or not, with and without sequence parallelism."""
    weights = full_weights(HEADS, KV_HEADS)
    x, upstream = tensors(2 * world_size, 2, HIDDEN, seed=20), tensors(2 * world_size, 2, HIDDEN, seed=21)
    want, want_grads = dense_step(weights, x, upstream)
    with laid_out_as(order):
        initialize(world_size)
        for fuse_qkv, sequence_parallel in itertools.product((False, True), (False, True)):
            block, _ = build(names, fuse_qkv=fuse_qkv, sequence_parallel=sequence_parallel)
            assert block.qkv_proj.rank_stride == block.o_proj.rank_stride == (2 if order == "trn1" else 1)
            local = shard if sequence_parallel else lambda full, dim: full.clone()
            mine = local(x, 0).requires_grad_()
            output = block(mine)
            assert_float64_close(output, local(want, 0), "output")
            output.backward(local(upstream, 0))
            assert_float64_close(mine.grad, local(want_grads["x"], 0), "dX")
            for name, want_grad in by_parameter(want_grads, fuse_qkv=fuse_qkv).items():
                param = block.get_parameter(name)
                assert_float64_close(gathered(param.grad, param), want_grad, f"gradient of {name}")
                replicas_agree(param)
            norm = torch.stack([want_grads[name].norm() for name in weights]).norm()
            got = grads.get_grad_norm(block)
            torch.testing.assert_close(got.double(), norm, rtol=1e-6, atol=0)  # norms are fp32


def replicas_agree(param: nn.Parameter) -> None:
    """Ranks that hold the same rows have the same gradient, bit for bit."""
    ranges = [shard_ranges(param, rank=rank) for rank in range(dist.get_world_size())]
    offset = 0
    for piece, (start, stop) in enumerate(shard_ranges(param)):
        own = param.grad.narrow(param.partition_dim, offset, stop - start)
        for rank, other in enumerate(from_all_ranks(own.contiguous())):
            same = ranges[rank][piece] == (start, stop)
            assert torch.equal(other, own) == same, f"rows {start} to {stop} on rank {rank}"
        offset += stop - start


@distributed(world_size=4, slow=[8])
@pytest.mark.parametrize("fuse_qkv", [False, True])
@pytest.mark.parametrize("names", ["ours", "alias"])
def test_rank_files_in_neuronx_distributeds_layout_load(names, fuse_qkv, world_size, tmp_path):
    """Written by its rules: KV weights repeated as a whole, query heads and output columns beside their KV heads."""
    weights = full_weights(HEADS, KV_HEADS)
    config = SimpleNamespace(num_key_value_heads=KV_HEADS)
    with laid_out_as("trn1"):
        initialize(world_size)
        local = {name: local_part(f"{name}_proj.weight", weights[name], config) for name in "qkvo"}
        rank_file = tmp_path / f"tp_rank_{dist.get_rank():02d}_pp_rank_00" / "checkpoint.pt"
        rank_file.parent.mkdir()
        torch.save({"model": by_parameter(local, fuse_qkv=fuse_qkv)}, rank_file)
        dist.barrier()  # load looks at the files of all ranks
        block = Attention(names, fuse_qkv=fuse_qkv, sequence_parallel=False, heads=HEADS, kv_heads=KV_HEADS)
        checkpointing.load(tmp_path, block)
        describe_output_projections(block)
        x = tensors(4, 2, HIDDEN, seed=20)
        assert_float64_close(block(x), dense_step(weights, x, tensors(4, 2, HIDDEN))[0])
        for name, full in by_parameter(weights, fuse_qkv=fuse_qkv).items():
            param = block.get_parameter(name)
            assert torch.equal(gathered(param, param), full), name


@distributed(world_size=4)
def test_output_projection_that_cannot_be_found():
    """Slicing full weights for it would be wrong without a word."""

    class Several(Attention):
        def __init__(self, **second: object) -> None:
            super().__init__("ours", fuse_qkv=True, sequence_parallel=False, heads=HEADS, kv_heads=KV_HEADS)
            self.gate = layers.RowParallelLinear(HEADS * HEAD, HIDDEN, input_is_parallel=True, **second)

    with laid_out_as("trn1"):
        initialize(4)
        model = nn.Sequential(Several())
        message = error_message(lambda: checkpointing.get_sharded_model_dict(model, {}))
        assert_says(message, "0 has query heads on ranks 2 apart", "2 row-parallel", "24 inputs", "rank_stride=2")
        describe_output_projections(model, strict=False)
        assert model[0].o_proj.weight.rank_stride == model[0].gate.weight.rank_stride == 1
        named = Several(rank_stride=2)
        describe_output_projections(named)
        assert (named.o_proj.weight.rank_stride, named.gate.weight.rank_stride) == (1, 2)


# Gathered outputs


@distributed(world_size=4)
@pytest.mark.parametrize("order", ["trn1", "trn2"])
@pytest.mark.parametrize("fuse_qkv", [False, True])
def test_gathered_outputs_and_split_inputs_have_the_full_order(fuse_qkv, order):
    """A row-parallel layer that splits a full input stays as it is: nobody's heads are on other ranks."""
    weights, x = full_weights(HEADS, KV_HEADS), tensors(4, 2, HIDDEN, seed=20)
    options = {"bias": False, "dtype": torch.float64}
    with laid_out_as(order):
        initialize(4)
        block = nn.Module()
        block.qkv_proj = qkv_linear.GQAQKVColumnParallelLinear(
            HIDDEN, [HEADS * HEAD, KV_HEADS * HEAD], kv_size_multiplier=2, fuse_qkv=fuse_qkv, **options
        )
        block.o_proj = layers.RowParallelLinear(HEADS * HEAD, HIDDEN, **options)
        full = by_parameter(weights, fuse_qkv=fuse_qkv)
        block.load_state_dict(checkpointing.get_sharded_model_dict(block, full))
        outputs = block.qkv_proj(x)
        for name, output in zip("qkv", outputs, strict=True):
            assert_float64_close(output, x @ weights[name].t(), name)
        assert_float64_close(block.o_proj(attend(*outputs)), dense_step(weights, x, x)[0])


@distributed(world_size=4)
@pytest.mark.parametrize("rank_stride", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 3])
def test_linear_layers_in_any_order_equal_the_dense_ones(stride, rank_stride):
    """Column-parallel with gathered output, also where ranks hold replicas; row-parallel that splits its input."""
    initialize(4)
    options = {"bias": False, "dtype": torch.float64, "stride": stride, "rank_stride": rank_stride}
    x = tensors(5, HIDDEN, seed=20)
    for replicas in (1, 2, 4):
        torch.manual_seed(SEED)
        column = layers.ColumnParallelLinear(HIDDEN, 24, replicas=replicas, keep_master_weight=True, **options)
        assert_float64_close(column(x), x @ column.master_weight.t(), f"{replicas} replicas")
    alias = compat_layers.ColumnParallelLinear(HIDDEN, 24, keep_master_weight=True, **options)
    assert_float64_close(alias(x), x @ alias.master_weight.t(), "alias")
    row = layers.RowParallelLinear(24, HIDDEN, keep_master_weight=True, **options)
    y = tensors(5, 24, seed=21)
    assert_float64_close(row(y), y @ row.master_weight.t(), "row")
    message = error_message(lambda: layers.RowParallelLinear(24, HIDDEN, rank_stride=3))
    assert_says(message, "rank_stride 3", "tensor_model_parallel_size 4")
