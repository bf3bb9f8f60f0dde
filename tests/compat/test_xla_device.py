"""The literal device ``"xla"`` in code that runs again in backward, as the example models' causal masks do."""

from __future__ import annotations

import torch

from nxd_memopt.backends import backend
from nxd_memopt.compat.xla.device import XlaIsBackendDevice
from nxd_memopt.memory.recompute import checkpoint


def test_recomputed_code_may_name_it():
    devices = []

    def scaled(x):
        ones = torch.ones(3, device="xla")
        devices.append(ones.device)
        return (x * ones).square()

    x = torch.arange(3.0, requires_grad=True)
    with XlaIsBackendDevice():
        checkpoint(scaled, x).backward(torch.ones(3))
    assert devices == [backend.device] * 2
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4]
