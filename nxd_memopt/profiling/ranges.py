"""Ranges of a profile that name what runs: calls of modules, and gradients as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from nxd_memopt.profiling.operations import GRADIENT, MODULE, PART


def part_of_step(title: str) -> record_function:
    """Return the context of a part of a training step that no module runs, such as the optimizer."""
    return record_function(PART + title)


def module_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each module by its ``id``; of ``model`` itself the name of its class."""
    return {id(module): name or type(module).__name__ for name, module in model.named_modules()}


@contextmanager
def module_ranges(model: nn.Module) -> Iterator[None]:
    """Record a range around each call of ``model`` and its modules in the block.

    ``nn.Module.__call__`` is replaced, because hooks would turn fused paths off
    (``parallel_layers/fusion.py``). What a fused path computes without calling a module belongs to
    the module around it.
    """
    names = {key: MODULE + name for key, name in module_names(model).items()}
    original: Callable[..., Any] = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return original(self, *args, **kwargs)
        with record_function(name):
            return original(self, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextmanager
def gradient_ranges(model: nn.Module) -> Iterator[None]:
    """Record the addresses of gradients in the block, when autograd has accumulated them.

    They are freed before the step ends, so that only a range of the profile can name them.
    """

    def record(parameter: Tensor) -> None:
        for gradient in gradients_of(parameter):
            with record_function(f"{GRADIENT}{gradient.untyped_storage().data_ptr()}"):
                pass

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(record) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients_of(tensor: Tensor) -> list[Tensor]:
    """Return the gradients of a parameter that exist: ``grad``, and the sum ``main_grad``."""
    found = [tensor.grad if tensor.is_leaf else None, getattr(tensor, "main_grad", None)]
    return [gradient for gradient in found if isinstance(gradient, Tensor)]
