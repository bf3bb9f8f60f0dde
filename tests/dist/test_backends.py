"""Backend collectives on real ranks against hand-computed results; inputs are never written to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.reference import integers, shard, unchanged

# The third rank starts a world of its own, 25 seconds with torch_xla.
SIZES, SLOW_SIZES = ([2], [3]) if backend.name == "xla" else ([2, 3], [])
# Dtype and whether the input is contiguous.
INPUTS = [
    (torch.float64, True),
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, True),
    (torch.int64, False),
]


def group_and_inputs(dtype, *shape):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    # |values| <= 4 ranks * 9: exact in every dtype
    inputs = [integers(*shape, seed=rank).to(dtype).to(backend.device) for rank in range(dist.get_world_size())]
    return parallel_state.get_tensor_model_parallel_group(), inputs


@distributed(SIZES, slow=SLOW_SIZES)
@pytest.mark.parametrize(("dtype", "contiguous"), INPUTS, ids=str)
def test_collectives(dtype, contiguous):
    size, rank = dist.get_world_size(), dist.get_rank()
    group, inputs = group_and_inputs(dtype, 2 * size, 5)
    mine = inputs[rank] if contiguous else inputs[rank].t().contiguous().t()
    total = torch.stack(inputs).sum(0)
    expected = {
        "all_reduce": total,
        "all_gather": torch.cat(inputs),
        "reduce_scatter": shard(total, 0),
        "all_to_all": torch.cat([shard(x, 0) for x in inputs]),
    }
    for name, result in expected.items():
        for suffix in ["", "_async"] if hasattr(backend, f"{name}_async") else [""]:
            with unchanged(mine):
                out = getattr(backend, name + suffix)(mine, group)
                out = out.wait() if suffix else out
            assert torch.equal(out, result), name + suffix
            assert out.dtype == dtype


@distributed(SIZES, slow=SLOW_SIZES)
@pytest.mark.parametrize(("op", "reference"), [("max", torch.amax), ("min", torch.amin)])
def test_all_reduce_ops(op, reference):
    group, inputs = group_and_inputs(torch.float32, 4, 5)
    assert torch.equal(backend.all_reduce(inputs[dist.get_rank()], group, op=op), reference(torch.stack(inputs), 0))


@distributed(SIZES[1:], slow=SLOW_SIZES)
def test_shard_is_this_ranks_chunk():
    group, inputs = group_and_inputs(torch.float32, 5, 6)
    assert torch.equal(backend.shard(inputs[0], 1, group), shard(inputs[0], 1))
    assert backend.group_size(group) == 3 and backend.group_rank(group) == dist.get_rank()
