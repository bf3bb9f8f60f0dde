"""The part of a pipeline model that this rank has, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class LocalModule(nn.Module):
    """Listings and state dicts of ``local_stage_modules``, one module for each chunk.

    Parameters and state dicts have the names of the whole model, listings of modules those of the traced stages.

    Args:
        module: the complete model.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.original_torch_module = module
        self.local_stage_modules: list[nn.Module] = []
        self.local_name_to_original_name: dict[str, str] = {}
        self.original_name_to_local_name: dict[str, str] = {}
        self.module_names: dict[str, str] = {}
        self.partitioned = False

    def _validate_partitioned(self) -> None:
        if not self.partitioned:
            raise RuntimeError("the model is not partitioned: call trace(), cut_pipeline_stage() and partition() first")

    def map_names(self, names: Mapping[str, str]) -> None:
        """Relate local names of parameters and buffers to those of the whole model.

        Args:
            names: module of a stage -> module of the whole model.
        """
        self.module_names = dict(names)
        for module in self.local_stage_modules:
            tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            for local, _ in tensors:
                original = _translate(local, names)
                self.local_name_to_original_name[local] = original
                self.original_name_to_local_name[original] = local

    def original_name(self, local: str) -> str:
        """Return the name in the whole model; manual stages have no other names than their own."""
        # Adapters that are added later have no entry, but their module has a name.
        return self.local_name_to_original_name.get(local) or _translate(local, self.module_names)

    # Listings

    def local_named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name in the whole model and parameter."""
        self._validate_partitioned()
        yield from self._named("named_parameters", prefix, recurse, remove_duplicate)

    def local_named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name in the whole model and buffer."""
        self._validate_partitioned()
        yield from self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(self, listing: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        """Yield what each chunk lists; with ``remove_duplicate`` once per rank."""
        seen: set[int] = set()
        for module in self.local_stage_modules:
            for local, tensor in getattr(module, listing)(recurse=recurse, remove_duplicate=remove_duplicate):
                if remove_duplicate and id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                yield f"{prefix}{'.' if prefix else ''}{self.original_name(local)}", tensor

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters."""
        for _, param in self.local_named_parameters(recurse=recurse):
            yield param

    def local_buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield this rank's buffers."""
        for _, buffer in self.local_named_buffers(recurse=recurse):
            yield buffer

    def local_named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all chunks, with their names there."""
        self._validate_partitioned()
        for module in self.local_stage_modules:
            yield from module.named_modules(*args, **kwargs)

    def local_modules(self) -> Iterator[nn.Module]:
        """Yield the modules of all chunks."""
        for _, module in self.local_named_modules():
            yield module

    def local_named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children of all chunks, with their names there."""
        self._validate_partitioned()
        for module in self.local_stage_modules:
            yield from module.named_children()

    def local_children(self) -> Iterator[nn.Module]:
        """Yield the children of all chunks."""
        for _, child in self.local_named_children():
            yield child

    # State dicts

    def local_state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """Return the state of all chunks, under names of the whole model."""
        self._validate_partitioned()
        state: dict[str, Any] = {}
        for module in self.local_stage_modules:
            for local, value in module.state_dict(*args, **kwargs).items():
                state[f"{prefix}{self.original_name(local)}"] = value
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load this rank's part of a whole or a local state dict; return the keys that are missing.

        Raises:
            RuntimeError: with ``strict``, a parameter is missing or has another shape.
        """
        self._validate_partitioned()
        results: list[Any] = []
        for module in self.local_stage_modules:
            own = {
                local: state_dict[name]
                for local in module.state_dict()
                if (name := self.original_name(local)) in state_dict
            }
            results.append(module.load_state_dict(own, strict=strict, assign=assign))
        for result in results[1:]:
            results[0].missing_keys.extend(result.missing_keys)
            results[0].unexpected_keys.extend(result.unexpected_keys)
        return results[0]

    # Of the whole model, as neuronx-distributed lists them

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original_torch_module.named_parameters(*args, **kwargs)

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        return self.original_torch_module.parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.original_torch_module.named_buffers(*args, **kwargs)

    def buffers(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        return self.original_torch_module.buffers(*args, **kwargs)


def _translate(local: str, names: Mapping[str, str]) -> str:
    """Return ``local`` with its longest part that ``names`` has replaced."""
    parts = local.split(".")
    for end in range(len(parts), 0, -1):
        original = names.get(".".join(parts[:end]))
        if original is not None:
            return ".".join([original, *parts[end:]])
    return local
