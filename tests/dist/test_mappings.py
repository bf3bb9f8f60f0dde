"""Mappings: forward and backward against the collective written out by hand, gradcheck of conjugate pairs, aliasing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.memory import checkpoint
from nxd_memopt.parallel_layers import embedding, mappings, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, integers, shard, tensors, unchanged

Parts = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A mapping and its definition on the lists of all members' tensors; ``i`` is the member."""

    call: Callable[..., Tensor]
    forward: Callable[[Parts, int], Tensor]
    backward: Callable[[Parts, int], Tensor]
    shape: tuple[int, ...]  # of the input; multiples of `size` are written as negative numbers


def total(parts: Parts) -> Tensor:
    return torch.stack(parts).sum(0)


def chunk(x: Tensor, dim: int, i: int, n: int) -> Tensor:
    return shard(x, dim, size=n, rank=i)


def sequence_cases(dim: int) -> dict[str, Case]:
    whole, part = ((-5, 2, 3), (5, 2, 3)) if dim == 0 else ((2, -5, 3), (2, 5, 3))
    options = {"sequence_dimension": dim}
    return {
        f"scatter_to_sequence_{dim}": Case(
            lambda x, **kw: mappings.scatter_to_sequence_parallel_region(x, **options, **kw),
            lambda xs, i: chunk(xs[i], dim, i, len(xs)),
            lambda gs, i: torch.cat(gs, dim),
            whole,
        ),
        f"gather_from_sequence_{dim}": Case(
            lambda x, **kw: mappings.gather_from_sequence_parallel_region(x, **options, **kw),
            lambda xs, i: torch.cat(xs, dim),
            lambda gs, i: chunk(total(gs), dim, i, len(gs)),
            part,
        ),
        f"gather_from_sequence_{dim}_to_replicated": Case(
            lambda x, **kw: mappings.gather_from_sequence_parallel_region(x, **options, to_model_parallel=False, **kw),
            lambda xs, i: torch.cat(xs, dim),
            lambda gs, i: chunk(gs[i], dim, i, len(gs)),
            part,
        ),
        f"reduce_scatter_to_sequence_{dim}": Case(
            lambda x, **kw: mappings.reduce_scatter_to_sequence_parallel_region(x, **options, **kw),
            lambda xs, i: chunk(total(xs), dim, i, len(xs)),
            lambda gs, i: torch.cat(gs, dim),
            whole,
        ),
    }


CASES = {
    "copy_to_tensor": Case(
        mappings.copy_to_tensor_model_parallel_region, lambda xs, i: xs[i], lambda gs, i: total(gs), (5, 3)
    ),
    "reduce_from_tensor": Case(
        mappings.reduce_from_tensor_model_parallel_region, lambda xs, i: total(xs), lambda gs, i: gs[i], (5, 3)
    ),
    "scatter_to_tensor": Case(
        mappings.scatter_to_tensor_model_parallel_region,
        lambda xs, i: chunk(xs[i], -1, i, len(xs)),
        lambda gs, i: torch.cat(gs, -1),
        (5, 3, -7),
    ),
    "gather_from_tensor": Case(
        mappings.gather_from_tensor_model_parallel_region,
        lambda xs, i: torch.cat(xs, -1),
        lambda gs, i: chunk(gs[i], -1, i, len(gs)),
        (5, 3, 7),
    ),
    **sequence_cases(0),
    **sequence_cases(1),
    "all_to_all": Case(
        mappings.all_to_all_in_expert_parallel_region,
        lambda xs, i: torch.cat([chunk(x, 0, i, len(xs)) for x in xs]),
        lambda gs, i: torch.cat([chunk(g, 0, i, len(gs)) for g in gs]),
        (-3, 5),
    ),
}


def check(case: Case, ranks: list[int], dtype: torch.dtype, contiguous: bool, **options) -> None:
    """Compare with the definition on integers, on which sums are exact."""
    i, size = ranks.index(dist.get_rank()), len(ranks)
    shape = [-n * size if n < 0 else n for n in case.shape]
    inputs = [integers(*shape, seed=rank).to(dtype) for rank in ranks]
    upstream = [integers(*case.forward(inputs, j).shape, seed=100 + rank).to(dtype) for j, rank in enumerate(ranks)]
    x, grad = inputs[i], upstream[i]
    if not contiguous:
        x, grad = x.transpose(0, 1).contiguous().transpose(0, 1), grad.transpose(0, 1).contiguous().transpose(0, 1)
    x = x.requires_grad_()
    with unchanged(x, grad):
        y = case.call(x, **options)
        (dx,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(y, case.forward(inputs, i)) and y.dtype == dtype
    assert torch.equal(dx, case.backward(upstream, i)) and dx.dtype == dtype


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_definition(name, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    # the expert group is not the default here: the default group of every mapping is tested, but for all_to_all
    options = {"process_group": parallel_state.get_tensor_model_parallel_group()} if name == "all_to_all" else {}
    for dtype in (torch.float64, torch.bfloat16):  # |sums| <= 36: exact in bf16
        for contiguous in (True, False):
            check(CASES[name], list(range(world_size)), dtype, contiguous, **options)


@distributed(world_size=4)
@pytest.mark.parametrize("name", CASES)
def test_group_argument_in_both_passes(name):
    """The backward pass uses the given group too. Groups of 2, one of neighbours and one with stride 2."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = dist.get_rank()
    neighbours, strided = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
    for ranks, group in (
        (neighbours, parallel_state.get_tensor_model_parallel_group()),
        (strided, parallel_state.get_data_parallel_group()),
    ):
        check(CASES[name], ranks, torch.float64, True, process_group=group)


@distributed(world_size=4)
def test_all_to_all_defaults_to_the_expert_group():
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    rank = dist.get_rank()
    check(CASES["all_to_all"], [rank - rank % 2, rank - rank % 2 + 1], torch.float64, True)


@pytest.mark.parametrize("name", CASES)
def test_identity_without_process_groups(name):
    x = integers(4, 4, 4).requires_grad_()
    y = CASES[name].call(x)
    (dx,) = torch.autograd.grad(y, x, integers(4, 4, 4, seed=1))
    assert torch.equal(y, x) and torch.equal(dx, integers(4, 4, 4, seed=1))


@distributed(world_size=[2, 3])
def test_gradient_shared_with_a_residual_branch_is_not_overwritten(world_size):
    """y = copy(h) + h has dy/dh = T + 1."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    h = torch.ones(3, requires_grad=True)
    (mappings.copy_to_tensor_model_parallel_region(h) + h).sum().backward()
    assert h.grad is not None and torch.equal(h.grad, torch.full((3,), world_size + 1.0))


@distributed(world_size=3)
def test_indivisible_lengths_are_refused():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=3)
    for call, what in (
        (mappings.scatter_to_sequence_parallel_region, "sequence length 1000"),
        (mappings.reduce_scatter_to_sequence_parallel_region, "sequence length 1000"),
    ):
        message = error_message(lambda call=call: call(torch.zeros(1000, 2)))
        assert_says(message, what, "tensor_model_parallel_size 3", "1002")
    message = error_message(lambda: mappings.scatter_to_tensor_model_parallel_region(torch.zeros(3, 7)))
    assert_says(message, "7", "tensor_model_parallel_size 3", "9")


@distributed(world_size=2)
def test_names_that_neuronx_distributed_examples_import():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    x = tensors(4, 3)
    local = mappings._split_along_first_dim(x)
    assert torch.equal(local, shard(x, 0))
    assert torch.equal(mappings._gather_along_first_dim(local), x)


# ``reduce_from_tensor_model_parallel_region`` outside autograd: what it writes to, and what it leaves alone

reduce_from = mappings.reduce_from_tensor_model_parallel_region


def own(*shape: int, dtype=torch.float32):
    """Rank + 1 everywhere: on two ranks the sum is 3."""
    return torch.full(shape, float(dist.get_rank() + 1), dtype=dtype, device=backend.device)


def is_all(tensor, value: float) -> bool:
    return bool((tensor.detach().cpu() == value).all())


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_outside_autograd_the_tensor_becomes_the_sum(dtype):
    parallel_state.initialize_model_parallel(2)
    plain, transposed = own(3, 4, dtype=dtype), own(4, 3, dtype=dtype).t()
    for tensor in (plain, transposed, own(2, 8, dtype=dtype)[:, 1::2]):
        version = tensor._version
        result = reduce_from(tensor)
        assert is_all(tensor, 3) and is_all(result, 3) and result.dtype == dtype
        assert tensor._version == version + 1, "autograd must notice a write to what it has saved"
    frozen_scale = nn.Parameter(own(3))
    with torch.no_grad():
        assert reduce_from(frozen_scale) is frozen_scale and is_all(frozen_scale, 3)


@distributed(world_size=2)
def test_in_autograd_and_alone_nothing_is_written_to():
    parallel_state.initialize_model_parallel(2)
    x = own(3).requires_grad_()
    with unchanged(x):
        y = reduce_from(x)
        assert is_all(y, 3) and y.requires_grad
    own_group = parallel_state.group_of([[0], [1]])
    alone = own(3)
    with unchanged(alone):
        assert reduce_from(alone, own_group) is alone
        with torch.no_grad():
            assert is_all(mappings.functional_reduce_from_tensor_model_parallel_region(alone), 3)


@distributed(world_size=2)
def test_a_tensor_whose_elements_share_memory_is_refused():
    parallel_state.initialize_model_parallel(2)
    message = error_message(lambda: reduce_from(own(1).expand(4)))
    assert_says(message, "[4]", "strides [0]", "contiguous()")


@distributed(world_size=2)
def test_layers_without_gradients_leave_their_parts_alone():
    """What a layer hands to its reduction may be read by a hook, or be another's residual."""
    parallel_state.initialize_model_parallel(2)
    layer = embedding.ParallelEmbedding(8, 4).to(backend.device)
    ids = torch.arange(8, device=backend.device)
    parts = []
    original = layer._local_rows
    layer._local_rows = lambda ids: parts.append(original(ids)) or parts[-1]
    with torch.no_grad():
        rows = layer(ids.unsqueeze(0))[0]
    held = rows.new_zeros(8, dtype=torch.bool)
    held[dist.get_rank() * 4 : dist.get_rank() * 4 + 4] = True
    assert is_all(parts[0][0][~held], 0) and not is_all(rows[~held], 0)


@distributed(world_size=2)
@pytest.mark.parametrize("grad", [False, True])
def test_a_recomputed_region_sums_once(grad):
    """A region's input that needs no gradient, and activations of its first pass, are summed by both passes."""
    parallel_state.initialize_model_parallel(2)
    x, weight = own(3), own(3).requires_grad_(grad)
    scale = torch.ones(3, device=backend.device, requires_grad=True)

    def region(x, weight, scale):
        part = weight * 2.0
        return (reduce_from(x) + reduce_from(part) + part) * scale

    with unchanged(x):
        out = checkpoint(region, x, weight, scale)
        out.sum().backward()
    want = 3 + 6 + 2 * (dist.get_rank() + 1)
    assert is_all(out, want) and is_all(scale.grad, want)
    assert not parallel_state.has_functional_mappings()
