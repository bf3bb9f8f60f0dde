"""Recomputation chosen by module, with neuronx-distributed's function names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nxd_memopt.memory.recompute import recompute_module


def checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Let ``module`` keep only its inputs and run again in backward; returns ``module``, its names unchanged."""
    recompute_module(module)
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
) -> None:
    """Wrap every module below ``model`` for which ``check_fn`` holds, innermost first; never ``model`` itself.

    Args:
        checkpoint_wrapper_fn: what it returns takes the module's place.
    """
    wrapped: dict[nn.Module, nn.Module] = {}
    for parent in reversed(list(model.modules())):
        for name, child in list(parent.named_children()):
            if child not in wrapped and check_fn(child):
                wrapped[child] = checkpoint_wrapper_fn(child)
            if wrapped.get(child, child) is not child:
                setattr(parent, name, wrapped[child])


def classes_to_recompute(model: nn.Module, choice: Any) -> tuple[type[nn.Module], ...]:
    """The classes that ``activation_checkpoint_config`` means for ``model``.

    Raises:
        ValueError: when it names none, or ``"full"`` cannot tell the transformer layers.
    """
    if choice == "full":
        return _layer_classes(model)
    classes: tuple[Any, ...] = tuple(choice) if isinstance(choice, list | tuple) else (choice,)
    if not classes or not all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        raise ValueError(
            f"activation_checkpoint_config {choice!r} must be None, 'full', a module class or a list of them"
        )
    if not any(isinstance(module, classes) for module in model.modules()):
        raise ValueError(
            f"activation_checkpoint_config names {[each.__name__ for each in classes]}, which the model has not: "
            "name classes of its modules, or 'full'"
        )
    return classes


def _layer_classes(model: Any) -> tuple[type[nn.Module], ...]:
    if hasattr(model, "decoder_layers"):
        return tuple({type(layer) for layer in model.decoder_layers()})
    names = getattr(model, "_no_split_modules", None) or ()
    classes = tuple({type(module) for module in model.modules() if type(module).__name__ in names})
    if not classes:
        raise ValueError(
            f"activation_checkpoint_config 'full' finds no layers: {type(model).__name__} has neither decoder_layers() "
            f"nor modules of the classes in _no_split_modules ({list(names)}): pass the layer's class"
        )
    return classes
