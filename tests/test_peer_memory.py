"""The arithmetic of peer memory that needs no GPU."""

import pytest
import torch

from nxd_memopt.backends.peer_memory import sum_over_ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sum_takes_this_ranks_own_part(size):
    for rank in range(size):
        whole = torch.randn(size, 5, 3, dtype=torch.float64)
        parts, own = whole.clone(), whole[rank].clone()
        parts[rank] = torch.nan
        torch.testing.assert_close(sum_over_ranks(own, parts, rank), whole.sum(0))
