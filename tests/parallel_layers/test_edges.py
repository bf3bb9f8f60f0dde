"""Inputs at the edge: named tuples, shards without rows, layers that cannot be padded, MLPs without tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.parallel_layers import grads, pad
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_memopt.parallel_layers.utils import map_tensors, move_model_to_device
from tests.reference import assert_says, error_message


class State(NamedTuple):
    hidden: Tensor
    rows: int


def test_a_recomputed_function_gets_its_named_tuple():
    state = State(torch.ones(3, requires_grad=True), 2)
    loss = checkpoint(lambda each: (each.hidden * each.rows).sum(), state)
    loss.backward()
    assert loss.item() == 6 and state.hidden.grad.tolist() == [2, 2, 2]


def test_tensors_of_named_tuples_are_mapped():
    found = map_tensors({"a": State(torch.ones(1), 2)}, torch.neg)
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
    move_model_to_device(layer, torch.device("cpu"))
    assert layer.weight is before and layer.again is before and before.grad.sum() == 4
    meta = ColumnParallelLinear(2, 2, bias=False, device="meta")
    move_model_to_device(meta, torch.device("cpu"))
    assert meta.weight.device.type == "cpu" and meta.weight.partition_dim == 0


def test_a_gathered_output_cannot_be_padded():
    layer = ColumnParallelLinear(8, 6, gather_output=True)
    message = error_message(lambda: pad.pad_model(nn.Sequential(layer), 4, 3, [ColumnParallelLinear]))
    assert_says(message, "gather_output True", "set it to", "False")
