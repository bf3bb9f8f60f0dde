"""Tests of stages whose model was built on meta, in a process with the alias; ``test_pipeline.py`` starts it."""

from __future__ import annotations

import torch
from torch import nn

from nxd_memopt.compat.pipeline.materialize import initialize_stages


class Frequencies(nn.Module):
    """Frequencies of RoPE: a buffer without a value on the meta device."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


def on_meta() -> tuple[nn.Module, nn.Module]:
    """A model and a traced stage of it, which have the leaf module in common but not the modules around it."""
    with torch.device("meta"):
        block = nn.Module()
        block.rope = Frequencies()
    stage = nn.Module()
    stage.rope = block.rope
    return nn.Sequential(block), stage


def replace_frequencies(module: nn.Module, device: torch.device) -> None:
    for name, child in module.named_children():
        if isinstance(child, Frequencies):
            module._modules[name] = Frequencies()


def test_modules_that_initialization_replaces_are_those_of_the_stages() -> None:
    whole, stage = on_meta()
    initialize_stages(whole, [stage], replace_frequencies)
    assert torch.equal(stage.rope.frequencies, torch.arange(4.0))


def test_a_buffer_that_nothing_initializes_is_no_number() -> None:
    whole, stage = on_meta()
    initialize_stages(whole, [stage], lambda module, device: None)
    assert stage.rope.frequencies.isnan().all()
