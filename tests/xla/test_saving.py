"""Saves right after an optimizer step, without mark_step: files hold the values of the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, gather_full_tensor, save_training_state
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import checkpointing, parallel_state
from nxd_memopt.parallel_layers.tensor_files import read_tensors
from nxd_memopt.trainer import finalize_checkpoint, load_checkpoint, save_checkpoint
from tests.dist.pool import SEED, distributed
from tests.xla.functionalization import MODES, functionalization

BOUND = 1e-5  # fp32 on two compilers
State = dict[str, Tensor]


class Vectors(nn.Module):
    """Parameters of one shape, whose gradients all depend on one sum: their updates are nearly the same program."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(4)])

    def forward(self) -> Tensor:
        total = sum(vector.sum() for vector in self.vectors)
        return sum((total * vector * vector).sum() for vector in self.vectors)  # pyright: ignore[reportReturnType]


def native(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    path = save_training_state(directory, 1, state=TrainingState(model, optimizer), config={})
    return load_file(path / "rank_00000.safetensors")


def background(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    with BackgroundSaver(directory) as saver:
        saver.save(1, TrainingState(model, optimizer), {})
    return load_file(directory / "step_00000001" / "rank_00000.safetensors")


def tagged(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> State:
    save_checkpoint(str(directory), "x", model, optimizer, **options)
    finalize_checkpoint()
    loaded: State = {}
    load_checkpoint(directory, "x", loaded)
    return named(loaded)


def tagged_xser(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return tagged(directory, model, optimizer, use_xser=True)


def tagged_async(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return tagged(directory, model, optimizer, async_save=True)


def parallel_layers(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    checkpointing.save({"model": model.state_dict()}, directory)
    return named(checkpointing.load(directory)["model"])


def gathered(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return named({name: gather_full_tensor(param) for name, param in model.named_parameters()})


def named(state: Any) -> State:
    return {f"model.{name}": tensor for name, tensor in state.items()}


def step_without_mark(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, ...]:
    """A model on the device after a step that is still pending, and one on the CPU after the same step."""
    torch.manual_seed(SEED)
    reference = Vectors()
    model = copy.deepcopy(reference).to(backend.device)
    backend.mark_step()
    optimizers = []
    for each in (reference, model):
        optimizers.append(make(each))
        each().backward()
        optimizers[-1].step()
    return model, optimizers[1], reference, optimizers[0]


@distributed(1)
@MODES
@pytest.mark.parametrize("save", [native, background, tagged_xser, tagged_async, parallel_layers, gathered])
def test_a_save_after_a_pending_step_holds_its_values(save, enabled, tmp_path):
    with functionalization(enabled=enabled):
        parallel_state.initialize_model_parallel(1)
        model, optimizer, reference, reference_optimizer = step_without_mark(
            lambda each: torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9)
        )
        stored = save(tmp_path / "checkpoint", model, optimizer)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(stored[f"model.{name}"].cpu(), param.detach(), rtol=BOUND, atol=BOUND)
        momentum = stored.get(f"optimizer.momentum_buffer.{name}")
        if save in (native, background):
            expected = reference_optimizer.state[param]["momentum_buffer"]
            torch.testing.assert_close(momentum, expected, rtol=BOUND, atol=BOUND)


def zero1_on_the_device(model: nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
    if next(model.parameters()).device.type == "cpu":
        return torch.optim.SGD(model.parameters(), **options)
    return NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, grad_clipping=False, **options)


@distributed(1)
@MODES
def test_rank_files_after_a_pending_step_hold_its_values(enabled, tmp_path):
    with functionalization(enabled=enabled):
        parallel_state.initialize_model_parallel(1)
        _, optimizer, reference, reference_optimizer = step_without_mark(zero1_on_the_device)
        optimizer.save_sharded_state_dict(tmp_path)
    stored = read_tensors(tmp_path / "optim.dp_rank_00.tp_rank_00")["base_state"]
    for i, param in enumerate(reference.parameters()):
        expected = reference_optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(stored[i]["momentum_buffer"], expected, rtol=BOUND, atol=BOUND)
