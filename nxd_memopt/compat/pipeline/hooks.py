"""neuronx-distributed's functions that run once a pipeline model is partitioned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

# The one function that is given the model, by its name, as in neuronx-distributed.
_TAKES_MODEL = "filter_to_local_parameter_group"


class PostPartitionHooks:
    """Functions to call at the end of ``NxDPPModel.partition``."""

    def __init__(self) -> None:
        self.hooks: list[dict[str, Any]] = []

    def register_post_partition_hook(
        self,
        callable_function: Callable[..., Any],
        func_args: Sequence[Any] = (),
        func_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Call ``callable_function(*func_args, **func_kwargs)`` after the next partition."""
        function = partial(callable_function, *func_args, **(func_kwargs or {}))
        self.hooks.append({"function": function, "name": getattr(callable_function, "__name__", "")})

    def execute_all_hooks(self, model: Any = None) -> list[Any]:
        """Call the functions in order, forget them, and return their results.

        Raises:
            ValueError: a function needs ``model``, and it is None.
        """
        registered, self.hooks = self.hooks, []
        results: list[Any] = []
        for hook in registered:
            if hook["name"] != _TAKES_MODEL:
                results.append(hook["function"]())
                continue
            if model is None:
                raise ValueError(f"the hook {_TAKES_MODEL} needs the partitioned model: pass model")
            results.append(hook["function"](model=model))
        return results


hooks = PostPartitionHooks()
"""The functions that ``NxDPPModel.partition`` calls."""
