"""Maps the literal device ``"xla"`` to the backend's device where torch_xla is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nxd_memopt.backends import backend


def _resolve(value: Any) -> Any:
    """Return the backend's device for ``"xla"`` or ``"xla:N"``, and any other value unchanged."""
    if isinstance(value, torch.device) and value.type == "xla":
        return backend.device
    # Every index means the same device: a process has one.
    if isinstance(value, str) and (value == "xla" or value.startswith("xla:")):
        return backend.device
    return value


class XlaIsBackendDevice(TorchFunctionMode):
    """Function mode that replaces device ``"xla"`` in ``device=`` and in ``Tensor.to``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called for every torch function. Only ``to`` takes a device by position among the calls
        # that scripts make with "xla"; factory functions take it by keyword.
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _resolve(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *map(_resolve, args[1:]))
        return func(*args, **kwargs)


def install() -> None:
    """Activate the mode for the rest of the process, in the calling thread."""
    XlaIsBackendDevice().__enter__()
