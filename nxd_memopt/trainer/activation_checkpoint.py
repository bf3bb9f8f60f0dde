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
    classes: tuple[Any, ...] = tuple(choice) if isinstance(choice, list | tuple) else (choice,)
    # Nothing would be recomputed, and the run would take more memory than it was configured for.
    is_used = all(isinstance(each, type) for each in classes) and any(isinstance(m, classes) for m in model.modules())
    if not is_used:
        raise ValueError(
            f"activation_checkpoint_config is {choice!r} and must be None, 'full', or a class of the model's modules "
            "or a list of them"
        )
    return classes


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
