"""``reduce_from_tensor_model_parallel_region`` outside autograd: what it writes to, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt.backends import backend
from nxd_memopt.memory import checkpoint
from nxd_memopt.parallel_layers import embedding, mappings, parallel_state
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message, unchanged

reduce_from = mappings.reduce_from_tensor_model_parallel_region


def own(*shape: int, dtype=torch.float32):
    """Rank + 1 everywhere: on two ranks the sum is 3."""
    return torch.full(shape, float(dist.get_rank() + 1), dtype=dtype, device=backend.device)


def is_all(tensor, value: float) -> bool:
    return bool((tensor.detach().cpu() == value).all())


@distributed(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
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


@distributed(2)
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


@distributed(2)
def test_a_tensor_whose_elements_share_memory_is_refused():
    parallel_state.initialize_model_parallel(2)
    message = error_message(lambda: reduce_from(own(1).expand(4)))
    assert_says(message, "[4]", "strides [0]", "contiguous()")


@distributed(2)
def test_autograd_notices_a_write_to_what_it_saved():
    parallel_state.initialize_model_parallel(2)
    x, weight = own(3), own(3).requires_grad_()
    y = weight * x
    reduce_from(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@distributed(2)
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


@distributed(2)
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
