"""Recomputation chosen by module, with neuronx-distributed's function names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nxd_memopt.memory.recompute import recompute_module


def checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Save only the inputs of ``module`` in forward and run it again in backward.

    Return ``module``; names do not change.
    """
    recompute_module(module)
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
) -> None:
    """Wrap every submodule of ``model`` for which ``check_fn`` is true, innermost first; never
    ``model`` itself.

    Args:
        model: the model whose submodules are wrapped.
        checkpoint_wrapper_fn: returns the module that replaces its argument.
        check_fn: selects the modules.
    """
    wrapped: dict[nn.Module, nn.Module] = {}
    # ``modules()`` lists parents before children: in reverse order inner modules are wrapped
    # first. A module that is shared by several parents is wrapped once.
    for parent in reversed(list(model.modules())):
        for name, child in list(parent.named_children()):
            if child not in wrapped and check_fn(child):
                wrapped[child] = checkpoint_wrapper_fn(child)
            if wrapped.get(child, child) is not child:
                setattr(parent, name, wrapped[child])


def classes_to_recompute(model: nn.Module, choice: Any) -> tuple[type[nn.Module], ...]:
    """Return the module classes that ``activation_checkpoint_config`` selects for ``model``.

    Args:
        model: the model.
        choice: ``"full"``, a module class, or a list of module classes.

    Raises:
        ValueError: the model has no module of these classes, or ``"full"`` does not find the
            transformer layers.
    """
    if choice == "full":
        return _layer_classes(model)
    classes: tuple[Any, ...] = (choice,)
    if isinstance(choice, list | tuple):
        classes = tuple(choice)
    if not classes or not all(_is_module_class(each) for each in classes):
        raise ValueError(
            f"activation_checkpoint_config {choice!r} must be None, 'full', a module class or a list of them"
        )
    if not any(isinstance(module, classes) for module in model.modules()):
        raise ValueError(
            f"activation_checkpoint_config names {[each.__name__ for each in classes]}, which the "
            "model has not: name classes of its modules, or 'full'"
        )
    return classes


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _layer_classes(model: Any) -> tuple[type[nn.Module], ...]:
    """Return the classes of the transformer layers, from ``decoder_layers()`` or transformers'
    ``_no_split_modules``.
    """
    if hasattr(model, "decoder_layers"):
        return tuple({type(layer) for layer in model.decoder_layers()})
    # transformers lists the names of the classes that must stay on one device there: its decoder
    # layers. The list may name classes that this model does not use.
    names = getattr(model, "_no_split_modules", None) or ()
    classes = tuple({type(module) for module in model.modules() if type(module).__name__ in names})
    if not classes:
        raise ValueError(
            f"activation_checkpoint_config 'full' finds no layers: {type(model).__name__} has neither decoder_layers() "
            f"nor modules of the classes in _no_split_modules ({list(names)}): pass the layer's class"
        )
    return classes
