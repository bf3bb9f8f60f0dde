"""Traces a model with torch.fx, without entering layers, for ``partition``."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Tracer
from torch.fx._symbolic_trace import _create_wrapped_func

from nxd_memopt.compat import functions
from nxd_memopt.compat.alias import AliasModule, target

# What is never entered: its operations have collectives and autograd functions, which fx cannot trace.
_OWN_PACKAGES = ("nxd_memopt.parallel_layers.", "nxd_memopt.modules.", "nxd_memopt.compat.")
_HF_REMEDY = (
    "install transformers 4.48, divide a list of layers with manual_pp_partition, or train a model of "
    "nxd_memopt.models, which is divided without a trace"
)
_OWN_MODULES = ("neuronx_distributed", "neuronx_distributed.parallel_layers", "torch_xla.core.xla_model")


class NxDTracer(Tracer):
    """Tracer that does not enter modules named in ``leaf_modules``, nor parallel layers.

    A name is a class's, of the module or of a base class, or a module's qualified name.
    """

    leaf_modules: Sequence[str] = ()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether ``m`` is not traced into."""
        # Whole names: "Linear" must not match ColumnParallelLinear.
        names = {cls.__name__ for cls in type(m).__mro__}
        if not names.isdisjoint(self.leaf_modules) or module_qualified_name in self.leaf_modules:
            return True
        return type(m).__module__.startswith(_OWN_PACKAGES) or super().is_leaf_module(m, module_qualified_name)


class TorchTracerWrapper(NxDTracer):
    """torch.fx's tracer, in which shapes of parameters are numbers.

    Args:
        config: ``leaf_modules``, ``autowrap_functions`` and ``autowrap_modules``.
    """

    name = "pytorch"

    def __init__(self, **config: Any) -> None:
        super().__init__(
            autowrap_modules=tuple(config["autowrap_modules"]),
            autowrap_functions=tuple(config["autowrap_functions"]),
            param_shapes_constant=True,
        )
        self.leaf_modules = config.get("leaf_modules", ())


@functools.cache
def _hf_tracer_class() -> Any:
    """Return ``HFTracerWrapper``, a subclass of transformers' tracer if the installed version has one."""
    try:
        from transformers.utils.fx import HFTracer  # pyright: ignore[reportMissingImports]

        bases: tuple[Any, ...] = (NxDTracer, HFTracer)
    except ImportError:  # transformers 5 has no tracer
        bases = (NxDTracer,)

    class HFTracerWrapper(*bases):
        """Tracer of transformers' models, with the tracer that transformers 4 has.

        Raises:
            ImportError: the installed transformers has none.
        """

        name = "HF"

        def __init__(self, **config: Any) -> None:
            if len(bases) == 1:
                raise ImportError(f"transformers.utils.fx, which traces transformers' models, is missing: {_HF_REMEDY}")
            super().__init__(
                autowrap_modules=tuple(config["autowrap_modules"]),
                autowrap_functions=tuple(config["autowrap_functions"]),
            )
            self.leaf_modules = config.get("leaf_modules", ())

    return HFTracerWrapper


def __getattr__(name: str) -> Any:
    """Return ``HFTracerWrapper`` at its first use, because it imports transformers."""
    if name == "HFTracerWrapper":
        return _hf_tracer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_hf_pretrained_model(model: Any) -> bool:
    """Return whether ``model`` is one of transformers'."""
    transformers: Any = sys.modules.get("transformers")  # not imported: then no model is of its class
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def get_tracer_class(model: nn.Module, tracer_cls: Any = None) -> Any:
    """Return the tracer's class of ``"torch"``, ``"hf"``, a class, or None: by the model's class.

    Raises:
        ValueError: another name.
    """
    if tracer_cls is None:
        return _hf_tracer_class() if is_hf_pretrained_model(model) else TorchTracerWrapper
    if not isinstance(tracer_cls, str):
        return tracer_cls
    if tracer_cls == "hf":
        return _hf_tracer_class()
    if tracer_cls != "torch":
        raise ValueError(f"tracer_cls must be 'torch', 'hf' or a class, got {tracer_cls!r}")
    return TorchTracerWrapper


def get_concrete_args(
    model: nn.Module,
    input_names: Sequence[str] | None = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``forward`` that stay at their defaults, by name.

    Args:
        model: the model.
        input_names: arguments that are traced; default those of a call with ``args`` and ``kwargs``.
        args, kwargs: arguments of a call.

    Raises:
        ValueError: ``forward`` has no such argument, or nothing says which are traced.
    """
    parameters = inspect.signature(model.forward).parameters
    if input_names is None:
        if args is None and kwargs is None:
            raise ValueError("nothing says which arguments are traced: pass input_names")
        input_names = [*list(parameters)[: len(args or ())], *(kwargs or ())]
    unknown = [name for name in input_names if name not in parameters]
    if unknown:
        raise ValueError(f"the model's forward has no inputs {unknown}: use some of {list(parameters)}")
    return {each.name: each.default for each in parameters.values() if each.name not in input_names}


@contextmanager
def patch_obj_method(autowrap_obj_methods: Mapping[Any, Sequence[str]] | None) -> Iterator[None]:
    """Within the block, methods of objects are single calls in a trace.

    Args:
        autowrap_obj_methods: object -> names of its methods.

    Raises:
        ValueError: an object has no such method.
    """
    replaced: list[tuple[Any, str, bool, Any]] = []
    try:
        for obj, names in (autowrap_obj_methods or {}).items():
            for name in names:
                if not hasattr(obj, name):
                    raise ValueError(f"autowrap_obj_methods: {type(obj).__name__} has no method {name}")
                method = getattr(obj, name)
                replaced.append((obj, name, name in vars(obj), method))
                setattr(obj, name, _create_wrapped_func(method))
        yield
    finally:
        for obj, name, is_own, method in replaced:
            # A method of the class was hidden by an attribute of the object.
            if is_own:
                setattr(obj, name, method)
            else:
                delattr(obj, name)


def trace_model(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    tracer_cls: Any = None,
    leaf_modules: Sequence[str] | None = None,
    autowrap_functions: Sequence[Callable[..., Any]] | None = None,
    autowrap_modules: Sequence[ModuleType] | None = None,
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
) -> GraphModule:
    """Return the graph of ``model``; no argument is changed.

    Args:
        model: the model; its parameters may be on the meta device.
        args, kwargs, input_names: which arguments are traced; see ``get_concrete_args``.
        tracer_cls: see ``get_tracer_class``.
        leaf_modules: names of classes or modules that are not entered.
        autowrap_functions: functions that are single calls.
        autowrap_modules: modules with such functions.
        autowrap_obj_methods: see ``patch_obj_method``.

    Raises:
        ValueError: torch.fx cannot trace the forward of a model of transformers.
    """
    owners, wrapped = _functions_of(autowrap_modules or ())
    tracer = get_tracer_class(model, tracer_cls)(
        leaf_modules=sorted({*(leaf_modules or ()), *(layer.__name__ for layer in functions.PARALLEL_MODULES)}),
        autowrap_modules=(math,),
        autowrap_functions=tuple({*(autowrap_functions or ()), *functions.PARALLEL_FUNCTIONS, *wrapped}),
    )
    # Functions that a forward reaches as attributes of their modules are replaced there during the trace.
    tracer._autowrap_search.extend(owners)
    with patch_obj_method(autowrap_obj_methods):
        concrete_args = get_concrete_args(model, input_names, args, kwargs)
        try:
            graph = tracer.trace(model, concrete_args=concrete_args)
        except Exception as error:
            if not is_hf_pretrained_model(model) or not isinstance(tracer, TorchTracerWrapper):
                raise
            # Decorators and branches of transformers' code fail in many ways, all of them deep inside of torch.fx.
            raise ValueError(f"torch.fx cannot trace {type(model).__name__} ({error}): {_HF_REMEDY}") from error
    traced = GraphModule(model, graph)
    if is_hf_pretrained_model(model):
        # What transformers' code reads of its models.
        for name, value in {"config": model.config, "class_for_deserialization": type(model)}.items():
            setattr(traced, name, value)
    traced.graph.eliminate_dead_code()
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()
    _remove_meta_constants(traced)
    return traced


def _functions_of(modules: Sequence[ModuleType]) -> tuple[list[ModuleType], set[Callable[..., Any]]]:
    """Return the modules that define the functions of ``modules`` and of this library, and these functions."""
    owners: list[ModuleType] = []
    found: set[Callable[..., Any]] = set()
    for module in (*modules, *map(importlib.import_module, _OWN_MODULES)):
        # A module of the alias has no functions of its own: it names where they are.
        if not isinstance(module, AliasModule):
            owners.append(module)
            found |= {each for each in vars(module).values() if isinstance(each, FunctionType)}
            continue
        for location in module._offered.values():
            owner, name = target(location)
            value = getattr(owner, name, None)
            if isinstance(value, FunctionType):
                owners.append(owner)
                found.add(value)
    return owners, found


def _remove_meta_constants(traced: GraphModule) -> None:
    """Remove the tensors on the meta device that transformers' tracer has left."""
    for name, buffer in list(traced.named_buffers()):
        if "_tensor_constant" in name and hasattr(traced, name) and buffer.is_meta:
            delattr(traced, name)
