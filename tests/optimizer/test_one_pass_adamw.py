"""AdamW where its kernel does not run: torch's step, closures and hooks."""

from __future__ import annotations

import torch
from torch import nn

from nxd_memopt.optimizer import AdamW
from tests.reference import tensors


def test_closures_and_hooks_are_called_once_as_by_torch():
    params = [nn.Parameter(tensors(5, 3)) for _ in range(2)]
    calls: list[str] = []
    for kind, param in zip((AdamW, torch.optim.AdamW), params, strict=True):
        optimizer = kind([param], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("behind"))

        def closure(param=param, optimizer=optimizer):
            optimizer.zero_grad()
            loss = param.square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[0] > losses[1] > losses[2]
    assert calls == ["before", "behind"] * 6
    assert torch.equal(*params)


def test_hooks_run_once_beside_an_optimizer_of_torchs():
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])  # makes torch call hooks in its own step
    param, calls = nn.Parameter(torch.ones(2)), []
    optimizer = AdamW([param])
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    optimizer.step()  # without a gradient
    assert torch.equal(param, torch.ones(2))
    param.grad = torch.ones(2)
    optimizer.step()
    assert calls == ["behind"] * 2 and param[0] < 1
