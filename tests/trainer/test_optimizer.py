"""The optimizer of NxD's trainer in one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nxd_memopt.trainer.optimizer import NxDOptimizer


@pytest.mark.parametrize("clips", [False, True])
def test_an_infinite_gradient_without_clipping_leaves_the_other_parameters_alone(clips):
    """With clipping the factor, bound / infinity, is 0, and infinity times 0 no number."""
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    params[0].grad, params[1].grad = torch.tensor([1.0, torch.inf, 1.0]), torch.ones(3)
    options = {"zero_one_enabled": False, "grad_clipping": clips, "max_grad_norm": 0.5}
    optimizer = NxDOptimizer(torch.optim.SGD(params, lr=1.0), {"optimizer_config": options})
    optimizer.step()
    assert optimizer.grad_norm == torch.inf
    assert params[1].tolist() == [0.0 if clips else -1.0] * 3
    assert params[0].isfinite().tolist() == [True, False, True]


def test_copies_have_the_wrapped_optimizer():
    """Through copy and pickle, as a multiprocessing launcher or a script's snapshot makes them."""
    param = torch.nn.Parameter(torch.zeros(3))
    options = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 0.5}
    optimizer = NxDOptimizer(torch.optim.SGD([param], lr=0.25), {"optimizer_config": options})
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again.param_groups[0]["lr"] == 0.25 and again.nxd_config == optimizer.nxd_config
        again.params[0].grad = torch.ones(3)
        again.step()
        assert again.params[0].sum() < 0 and param.sum() == 0
