"""parallel_layers in one process without torch.distributed: layers, shard descriptions, head padding, moves."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import nxd_memopt
from nxd_memopt import parallel_layers
from nxd_memopt.modules.attention import merge_heads, split_heads
from nxd_memopt.parallel_layers import grads, layers, pad, utils
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from tests.reference import assert_float64_close, assert_says, error_message, tensors

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


@pytest.mark.parametrize("sequence_first", [False, True])
def test_heads_are_split_and_merged(sequence_first):
    x = tensors(2, 3, 12)  # [B, S, h*d], or [S, B, h*d]
    split = split_heads(x, 4, sequence_first=sequence_first)
    assert split.shape == ((3, 3, 2, 4) if sequence_first else (2, 3, 3, 4))
    assert torch.equal(split[1, 2, 0], x[0, 1, 8:] if sequence_first else x[1, 0, 8:])
    assert torch.equal(merge_heads(split, sequence_first=sequence_first), x)


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


class State(NamedTuple):
    hidden: Tensor
    rows: int


def test_tensors_of_named_tuples_are_mapped():
    found = utils.map_tensors({"a": State(torch.ones(1), 2)}, torch.neg)
    assert isinstance(found["a"], State) and found["a"].hidden.item() == -1


def test_the_largest_element_of_a_shard_without_rows_is_none():
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2,), (0, 4))]
    params[0].grad, params[1].grad = torch.tensor([0.0, -3.0]), torch.zeros(0, 4)
    assert grads.get_grad_norm(params, torch.inf) == 3 and grads.get_grad_norm(params[1:], torch.inf) == 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = ColumnParallelLinear(6, 6, bias=False, gather_output=False)
        self.output = RowParallelLinear(6, 6, bias=False, input_is_parallel=True)


def test_only_layers_before_a_row_parallel_layer_are_padded():
    """Zero rows of an output layer over the vocabulary would be a part of the softmax."""
    model = nn.Module()
    model.attention = Attention()
    model.head = ColumnParallelLinear(6, 16, bias=False, gather_output=False)
    pad.pad_model(model, 4, 3)
    assert model.attention.query.weight.shape == (8, 6) and model.attention.output.weight.shape == (6, 8)
    assert model.head.weight.shape == (16, 6)
    # As in BERT: the output projection is in a sibling of the module with the query projection.
    block = nn.ModuleDict({"self": nn.ModuleDict({"query": Attention().query})})
    block["output"] = nn.ModuleDict({"dense": Attention().output})
    model = nn.ModuleDict({"layer": block, "head": ColumnParallelLinear(6, 16, bias=False, gather_output=False)})
    pad.pad_model(model, 4, 3)
    assert block["self"]["query"].weight.shape == (8, 6) and block["output"]["dense"].weight.shape == (6, 8)
    assert model["head"].weight.shape == (16, 6)


def test_moved_parameters_stay_those_of_an_optimizer():
    layer = ColumnParallelLinear(2, 2, bias=False)
    layer.again = layer.weight
    before = layer.weight
    before.grad = torch.ones(2, 2)
    utils.move_model_to_device(layer, torch.device("cpu"))
    assert layer.weight is before and layer.again is before and before.grad.sum() == 4
    meta = ColumnParallelLinear(2, 2, bias=False, device="meta")
    utils.move_model_to_device(meta, torch.device("cpu"))
    assert meta.weight.device.type == "cpu" and meta.weight.partition_dim == 0


def test_a_gathered_output_cannot_be_padded():
    layer = ColumnParallelLinear(8, 6, gather_output=True)
    message = error_message(lambda: pad.pad_model(nn.Sequential(layer), 4, 3, [ColumnParallelLinear]))
    assert_says(message, "gather_output True", "set it to", "False")


def test_packages_offer_the_names_of_neuronx_distributed() -> None:
    for package in (nxd_memopt, parallel_layers):
        assert set(package.__all__) <= set(dir(package))
        for name in dir(package):
            getattr(package, name)
    assert parallel_layers.ColumnParallelLinear is layers.ColumnParallelLinear
    with pytest.raises(AttributeError, match="no attribute 'ColumnLinear'"):
        _ = parallel_layers.ColumnLinear


def test_layers_print_their_sizes() -> None:
    assert repr(layers.RowParallelLinear(6, 4, bias=False)) == (
        "RowParallelLinear(in_features=6, out_features=4, bias=False, weight_per_partition=[4, 6], "
        "tensor_model_parallel_size=1, dtype=torch.float32, sequence_parallel_enabled=False)"
    )
    assert repr(layers.ParallelEmbedding(7, 3, padding_idx=1)).startswith(
        "ParallelEmbedding(7, 3, padding_idx=1, weight"
    )
