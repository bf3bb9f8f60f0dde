"""parallel_layers in one process without torch.distributed: plain layers, shard descriptions, head padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_memopt.modules.attention import merge_heads, split_heads
from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.parallel_layers import layers, pad, utils
from tests.reference import assert_float64_close, assert_says, error_message, fake_world, tensors

F64 = {"dtype": torch.float64}


def described(length: int, *, stride: int = 1, partitions: int = 1, replicas: int = 1) -> torch.Tensor:
    param = torch.empty(3, length)
    utils.set_tensor_model_parallel_attributes(param, True, 1, stride, partitions, full_shape=(3, 9), replicas=replicas)
    return param


@pytest.mark.parametrize(
    ("param", "by_rank"),
    [
        (described(4), [[(0, 4)]]),
        (described(2, partitions=4), [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]),
        (described(6, partitions=2, stride=3), [[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)]]),
        (described(4, partitions=2, replicas=2), [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]]),
        (described(5, partitions=2), [[(0, 5)], [(5, 10)]]),
    ],
    ids=["one", "four", "three blocks", "replicas", "padded"],
)
def test_shard_ranges_by_hand(param, by_rank):
    assert [utils.shard_ranges(param, rank=rank) for rank in range(len(by_rank))] == by_rank


def test_attributes_are_copied_and_kept_on_a_move():
    layer = layers.ColumnParallelLinear(4, 6, stride=2, gather_output=False)
    copy = torch.empty(6, 4)
    utils.copy_tensor_model_parallel_attributes(copy, layer.weight)
    for name in (
        "tensor_model_parallel",
        "partition_dim",
        "partition_stride",
        "num_partitions",
        "full_shape",
        "replicas",
    ):
        assert getattr(copy, name) == getattr(layer.weight, name)
    model = nn.Sequential(layer, layers.RowParallelLinear(6, 4, sequence_parallel_enabled=False))
    model[1].weight = layer.weight  # tied
    utils.move_model_to_device(model, torch.device("meta"))
    assert model[0].weight.is_meta and model[0].weight is model[1].weight
    assert model[0].weight.full_shape == (6, 4) and model[1].bias.sequence_parallel_enabled is False


@pytest.mark.parametrize("gather", [True, False])
def test_layers_are_plain_linear_layers(gather):
    torch.manual_seed(1)
    column = layers.ColumnParallelLinear(5, 7, gather_output=gather, **F64)
    row = layers.RowParallelLinear(7, 3, input_is_parallel=not gather, **F64)
    table = layers.ParallelEmbedding(11, 5, **F64)
    torch.manual_seed(1)
    dense = [nn.Linear(5, 7, **F64), nn.Linear(7, 3, **F64), nn.Embedding(11, 5, **F64)]
    ids = torch.arange(11).view(1, 11)
    assert_float64_close(row(column(table(ids))), dense[1](dense[0](dense[2](ids))))


def test_joint_projection_without_process_groups():
    layer = GQAQKVColumnParallelLinear(5, [6, 2], **F64)
    for out, name in zip(layer(tensors(3, 5)), "qkv", strict=True):
        want = tensors(3, 5) @ getattr(layer, f"weight_{name}").t() + getattr(layer, f"bias_{name}")
        assert_float64_close(out, want, name)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_heads_are_split_and_merged(sequence_first):
    x = tensors(2, 3, 12)  # [B, S, h*d], or [S, B, h*d]
    split = split_heads(x, 4, sequence_first=sequence_first)
    assert split.shape == ((3, 3, 2, 4) if sequence_first else (2, 3, 3, 4))
    assert torch.equal(split[1, 2, 0], x[0, 1, 8:] if sequence_first else x[1, 0, 8:])
    assert torch.equal(merge_heads(split, sequence_first=sequence_first), x)


@pytest.mark.parametrize(("heads", "size", "extra"), [(9, 2, 1), (8, 4, 0), (71, 8, 1), (12, 32, 20)])
def test_extra_heads(heads, size, extra):
    assert pad.get_number_of_extra_heads(heads, size) == extra


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.up = layers.ColumnParallelLinear(5, heads * 4, gather_output=False, **F64)
        self.down = layers.RowParallelLinear(heads * 4, 5, input_is_parallel=True, **F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_padded_heads_change_nothing():
    """Zero columns and rows: the same output, and no gradient that would wake them."""
    model, x = Block(3), tensors(7, 5)
    want = model(x)
    seen = []
    pad.pad_model(model, 2, 3, [Block], lambda module, ratio: seen.append((module, ratio)))
    assert model.up.weight.shape == (16, 5) and model.down.weight.shape == (5, 16)
    assert model.up.weight.partition_dim == 0 and model.down.weight.partition_dim == 1
    assert bool((model.up.weight[12:] == 0).all()) and bool((model.down.weight[:, 12:] == 0).all())
    assert all(ratio == pytest.approx(4 / 3) for _, ratio in seen) and seen
    assert_float64_close(model(x), want)


def test_padding_mask_by_hand():
    """6 heads on 2 KV heads, padded to 8 on 4 ranks: 3 real heads for each pair of ranks."""
    masks = [pad.generate_padding_mask(6, 8, 2, 4, rank).tolist() for rank in range(4)]
    assert masks == [[True, True], [True, False]] * 2


def test_padding_mask_follows_the_order_of_kv_replicas(monkeypatch):
    """3 query heads to each of 2 KV heads, padded to 4, on 4 ranks: on trn1 ranks 2 and 3 hold the second halves."""
    want = [[True, True], [True, True], [True, False], [True, False]]
    assert [pad.generate_padding_mask(6, 8, 2, 4, rank, rank_stride=2).tolist() for rank in range(4)] == want
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    assert [pad.generate_padding_mask(6, 8, 2, 4, rank).tolist() for rank in range(4)] == want


def test_divide():
    assert utils.divide(12, 4) == 3
    assert_says(error_message(lambda: utils.divide(13, 4)), "13", "4", "not divisible")


def test_padded_size():
    assert [utils.padded_size(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_autocast_casts_floats_alone():
    tensors_in = (torch.ones(2), torch.ones(2, dtype=torch.long), None)
    assert [t if t is None else t.dtype for t in utils.cast_if_autocast_enabled(*tensors_in)] == [
        torch.float32,
        torch.int64,
        None,
    ]
    with torch.autocast("cpu", torch.bfloat16):
        floats, integers, nothing = utils.cast_if_autocast_enabled(*tensors_in)
    assert (floats.dtype, integers.dtype, nothing) == (torch.bfloat16, torch.int64, None)


def test_layer_of_one_group_in_a_larger_world():
    """Sizes come from the groups alone."""
    from nxd_memopt.parallel_layers import parallel_state

    with fake_world(16, rank=9):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=8)
        layer = layers.ColumnParallelLinear(4, 80, gather_output=False, device="meta")
        assert layer.weight.shape == (10, 4) and utils.shard_ranges(layer.weight) == [(10, 20)]
