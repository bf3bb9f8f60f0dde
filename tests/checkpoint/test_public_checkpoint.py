"""``nxd_memopt.memory.checkpoint`` takes the arguments of torch's function; ``tests/xla`` runs the same tests there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from nxd_memopt.backends import backend
from nxd_memopt.memory import checkpoint
from nxd_memopt.parallel_layers import random
from tests.reference import assert_says, error_message


class Recorder:
    """A pair of contexts that notes when each is entered."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def __call__(self):
        return Noting(self.entered, "forward"), Noting(self.entered, "recomputation")


class Noting:
    def __init__(self, entered: list[str], name: str) -> None:
        self._entered, self._name = entered, name

    def __enter__(self) -> None:
        self._entered.append(self._name)

    def __exit__(self, *exception: object) -> None: ...


def keep_matmuls(ctx, operator, *args, **kwargs):
    del ctx, args, kwargs
    is_matmul = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def selective():
    return create_selective_checkpoint_contexts(keep_matmuls)


def gradients(options, *, run=checkpoint) -> tuple[list[torch.Tensor], int]:
    """Result and gradients of a region with dropout, and how often it ran."""
    random.model_parallel_manual_seed(3)
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(8, 8).to(backend.device)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    x = torch.randn(4, 8, generator=generator).to(backend.device).requires_grad_()
    calls = []

    def region(x, *, scale):
        calls.append(1)
        with random.get_rng_tracker().fork():
            hidden = torch.nn.functional.dropout(layer(x), 0.5)
        return torch.tanh(torch.nn.functional.dropout(hidden, 0.5) * scale)

    out = run(region, x, scale=0.5, **options)
    out.square().sum().backward()
    return [out.detach().cpu(), x.grad.cpu(), *(param.grad.cpu() for param in layer.parameters())], len(calls)


def direct(function, *args, **kwargs):
    return function(*args, **kwargs)


OPTIONS = [
    {},
    {"use_reentrant": True},
    {"use_reentrant": False},
    {"preserve_rng_state": True, "use_reentrant": False},
    {"preserve_rng_state": False},
    {"determinism_check": "none"},
    {"early_stop": False},
    {"context_fn": selective},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_options_change_no_result(options) -> None:
    expected, once = gradients({}, run=direct)
    found, twice = gradients(options)
    assert (once, twice) == (1, 2)
    for want, got in zip(expected, found, strict=True):
        # XLA fuses the two graphs differently: some fp32 roundings; another dropout mask would be off by 0.1
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 if backend.name == "xla" else 0)


def test_contexts_are_entered_around_both_passes() -> None:
    recorder = Recorder()
    gradients({"context_fn": recorder})
    assert recorder.entered == ["forward", "recomputation"]


def test_a_retained_graph_recomputes_again() -> None:
    random.model_parallel_manual_seed(3)  # streams of their own: contexts, which must be entered twice
    x = torch.ones(4, device=backend.device, requires_grad=True)
    out = checkpoint(lambda x: x.square(), x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert x.grad.tolist() == [4.0] * 4


def test_without_gradients_it_only_runs() -> None:
    with torch.no_grad():
        assert not checkpoint(lambda x: x + 1, torch.zeros(1, device=backend.device)).requires_grad


def test_what_it_cannot_honour_is_refused() -> None:
    x = torch.ones(2, device=backend.device, requires_grad=True)
    assert_says(error_message(lambda: checkpoint(torch.sin, x, determinism_check="all")), "'default', 'none'", "'all'")
    assert_says(error_message(lambda: checkpoint(torch.sin, x, debug=True)), "debug=True", "torch.utils.checkpoint")
    with pytest.raises(TypeError, match="no_such_option"):
        checkpoint(torch.sin, x, no_such_option=1)
