"""Fused paths that bypass submodules, and the changes of a model that turn them off.

A fused path computes several modules at once and calls none of them. Whether it may run is decided
when the model is built, and again when a hook is registered, a forward is replaced or a submodule
is replaced, but not in every forward.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

_PATHS = "_fused_paths"


class FusibleModule(nn.Module):
    """Module that fused paths may bypass, or whose submodules they may bypass.

    It tells its fused paths when a hook is registered on it, and when its forward, its class or one
    of its submodules is replaced.
    """

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        handle = super().register_forward_hook(*args, **kwargs)
        examine_fused_paths(self)
        return handle

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        handle = super().register_forward_pre_hook(*args, **kwargs)
        examine_fused_paths(self)
        return handle

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        handle = super().register_full_backward_hook(*args, **kwargs)
        examine_fused_paths(self)
        return handle

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        handle = super().register_full_backward_pre_hook(*args, **kwargs)
        examine_fused_paths(self)
        return handle

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        handle = super().register_backward_hook(*args, **kwargs)
        examine_fused_paths(self)
        return handle

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        examine_fused_paths(self)

    def __getstate__(self) -> dict[str, Any]:
        # The paths refer to the module that owns them: a copy of one linear layer would copy the
        # decoder layer around it. A copied path subscribes to the copied modules when it is used.
        state = self.__dict__.copy()
        state.pop(_PATHS, None)
        return state

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # torch.nn.utils.parametrize and FSDP2 replace the class of a module.
        if name in ("forward", "__class__") or isinstance(value, nn.Module):
            examine_fused_paths(self)


def examine_fused_paths(module: nn.Module, *, warn: bool = True) -> None:
    """Examine the fused paths that bypass ``module`` or its submodules.

    Call it after a change that the module cannot notice, such as a write to its ``__dict__``.

    Args:
        module: a module of a model; no-op unless it is a ``FusibleModule`` with fused paths.
        warn: warn if a path is turned off.
    """
    for path in module.__dict__.get(_PATHS, ()):
        path.examine(warn=warn)


class FusedPath:
    """A fused computation of submodules of ``owner`` that does not call them.

    Create it at the end of the owner's ``__init__``. The owner's forward runs the fused computation
    if ``is_active`` and calls the submodules otherwise. The path is off while a submodule has a
    hook, another forward or another class than expected, or while global module hooks are
    registered. Turning it off warns once per model and name.

    Args:
        owner: the module whose forward chooses.
        name: name of the computation, for warnings and ``Fusions.describe``.
        bypassed: expected class of each bypassed submodule, by its name in ``owner``.
        cost: what happens without the path, as a clause for the warning.
        unavailable: why the path cannot run on this device or with this configuration, or None.
        accepts_forward: returns whether a submodule whose forward was replaced may be bypassed
            nevertheless.
        overwritten: names of submodules that are called, and whose outputs backward overwrites: a hook could
            keep an output, so that the path is off while one has a hook.
    """

    def __init__(
        self,
        owner: FusibleModule,
        name: str,
        bypassed: Mapping[str, type[nn.Module]],
        *,
        cost: str,
        unavailable: str | None = None,
        accepts_forward: Callable[[nn.Module], bool] | None = None,
        overwritten: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.unavailable = unavailable
        self.location = type(owner).__name__
        self.fusions: Fusions | None = None
        self._owner = owner
        self._bypassed = dict(bypassed)
        self._cost = cost
        self._accepts_forward = accepts_forward
        self._overwritten = tuple(overwritten)
        # Names of the paths that have warned; ``Fusions`` shares one set among all paths of a model.
        self.warned: set[str] = set()
        self._obstacle: str | None = None
        self._is_subscribed = False
        self.examine(warn=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _is_subscribed=False)

    @property
    def is_active(self) -> bool:
        """Whether the fused computation may run."""
        if self.unavailable is not None:
            return False
        # Removing a hook notifies nobody: a path that is off looks at the modules again. So does
        # a copied path, once.
        if self._obstacle is not None or not self._is_subscribed:
            self.examine(warn=True)
        if self._obstacle is not None:
            return False
        # In a complete model the value is that of the beginning of forward, see
        # ``begin_forward``.
        if self.fusions is None:
            has_global_hooks = _has_any_global_hook()
        else:
            has_global_hooks = self.fusions.has_global_hooks
        if has_global_hooks:
            self._warn("a global module hook is registered")
            return False
        return True

    @property
    def reason_off(self) -> str | None:
        """Why the path is off, or None if it is on."""
        return self.unavailable or self._obstacle

    def examine(self, *, warn: bool) -> None:
        """Decide whether the path may run, and warn if it is turned off now."""
        was_on = self._obstacle is None
        self._obstacle = self._find_obstacle()
        if warn and was_on and self._obstacle is not None and self.unavailable is None:
            self._warn(self._obstacle)

    def _find_obstacle(self) -> str | None:
        """Return why a submodule must be called, or None if all can be bypassed."""
        self._subscribe(self._owner)
        self._is_subscribed = True
        for name, expected in self._bypassed.items():
            # Every module between the owner and the submodule can replace the next one.
            module: nn.Module = self._owner
            for part in name.split("."):
                found = getattr(module, part, None)
                if not isinstance(found, nn.Module):
                    return f"{name} is missing"
                module = found
                self._subscribe(module)
            if type(module) is not expected:
                return f"{name} is a {type(module).__name__} instead of a {expected.__name__}"
            if has_hooks(module):
                return f"{name} has a hook"
            # An instance attribute ``forward`` hides the method of the class: recompute, offload
            # and user code replace a forward in this way.
            if "forward" in vars(module):
                is_accepted = self._accepts_forward is not None and self._accepts_forward(module)
                if not is_accepted:
                    return f"{name} has a replaced forward"
        for name in self._overwritten:
            module = getattr(self._owner, name)
            self._subscribe(module)
            if has_hooks(module):
                return f"{name} has a hook"
        return None

    def _subscribe(self, module: nn.Module) -> None:
        """Let ``module`` report its changes to this path."""
        if isinstance(module, FusibleModule):
            paths = module.__dict__.setdefault(_PATHS, [])
            if self not in paths:
                paths.append(self)

    def _warn(self, obstacle: str) -> None:
        # A hook on every layer would give a warning for every layer.
        if self.name in self.warned:
            return
        self.warned.add(self.name)
        warnings.warn(
            f"{self.location}: {obstacle}, so the fused {self.name} is off here: {self._cost}. "
            "Further modules are not reported.",
            stacklevel=5,
        )


def has_hooks(module: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on ``module`` itself."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class Fusions:
    """The fused paths of a complete model; created once, at the end of the model's ``__init__``.

    Attributes:
        paths: all fused paths, which get their location in the model for warnings.
        has_global_hooks: whether global module hooks were registered when the last forward began.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths: list[FusedPath] = []
        self.has_global_hooks = False
        warned: set[str] = set()
        for location, module in model.named_modules():
            for path in vars(module).values():
                if isinstance(path, FusedPath):
                    path.location = location or type(module).__name__
                    path.fusions = self
                    path.warned = warned
                    self.paths.append(path)

    def begin_forward(self) -> None:
        """Note whether global module hooks are registered; the model's ``forward`` calls it first.

        A recomputation in backward must save the same tensors as its forward, although tools such
        as ``FlopCounterMode`` may have registered global hooks in between.
        """
        self.has_global_hooks = _has_any_global_hook()

    def describe(self) -> list[str]:
        """Return one line per kind of fused path: in how many modules it is on, and why not in others."""
        by_name: dict[str, list[FusedPath]] = defaultdict(list)
        for path in self.paths:
            path.examine(warn=False)
            by_name[path.name].append(path)
        lines = []
        for name, paths in by_name.items():
            # dict.fromkeys: each reason once, in the order of the modules.
            reasons = list(dict.fromkeys(path.reason_off for path in paths if path.reason_off is not None))
            active = sum(path.reason_off is None for path in paths)
            line = f"{name}: off"
            if active:
                line = f"{name}: on in {active} of {len(paths)}"
            if reasons:
                line += f" ({'; '.join(reasons)})"
            lines.append(line)
        return lines
