"""Activation recomputation: selects which modules run again in backward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn, overrides

from nxd_memopt.backends import backend
from nxd_memopt.backends.base import ContextPair
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory.selective import Keep, OnDevice, both_contexts, compiled_contexts, keeping_contexts
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.mappings import functional_contexts
from nxd_memopt.parallel_layers.random import replay_contexts
from nxd_memopt.parallel_layers.wrapping import Forward, Technique, is_wrapped, unwrap_forward, wrap_forward, wrapper_of
from nxd_memopt.planner.memory.layer_tensors import KEEPABLE_ATTENTION
from nxd_memopt.planner.techniques.recomputation import Recomputation, require_layers


class Recomputable(Protocol):
    """A model that names the parts that can be recomputed."""

    def decoder_layers(self) -> Sequence[nn.Module]:
        """Return the transformer layers in order.

        Each maps its first argument to the next hidden states.
        """
        ...

    def recompute_modules(self) -> Mapping[str, Sequence[nn.Module]]:
        """Return the modules of all layers, by the names of ``config.RECOMPUTE_MODULES``."""
        ...


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    keep_core_attn: bool | Keep = False,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], ContextPair] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function`` and save only its inputs.

    Backward runs it again with the same random numbers in all streams.

    The arguments are those of ``torch.utils.checkpoint.checkpoint``, on every backend. On XLA,
    where torch's function fails, optimization barriers separate the recomputation from the forward
    pass; otherwise the compiler would merge both. On a deterministic device the result and the
    gradients equal the ones without recomputation bit for bit.

    Args:
        function: called with ``args`` and ``kwargs``. On XLA it returns tensors in lists, tuples
            and dicts, and all tensors with autograd history that it uses must be among its
            arguments.
        keep_core_attn: save the outputs of fused attention kernels, so that backward does not run
            the kernels again. A function keeps them: it returns an object whose ``tensor()`` returns
            the tensor.
        use_reentrant: accepted for compatibility and ignored. One implementation supports keyword
            arguments, nested results and inputs that require no gradient.
        preserve_rng_state: accepted for compatibility and ignored. Random numbers are always the
            same.
        context_fn: returns one context manager for the forward pass and one for the recomputation.
        determinism_check: ``"default"`` compares shapes and dtypes of the recomputed tensors with
            the first ones (on XLA, of the results); ``"none"`` compares nothing.
        debug: must be False. torch's own function names the operators of both passes in errors, on
            CPU and CUDA.
        early_stop: stop the recomputation when all saved tensors are available. On XLA the
            recomputation always runs to the end.

    Raises:
        ValueError: an option has an unsupported value; on XLA also if the compiler flags would undo
            the recomputation: the flags must contain ``-O1``.
    """
    del use_reentrant, preserve_rng_state
    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check must be one of ['default', 'none'], got {determinism_check!r}")
    if debug:
        raise ValueError("debug=True is not offered here: leave it out, or use torch.utils.checkpoint on CPU and CUDA")
    # Without gradients nothing is saved, so there is nothing to recompute.
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return backend.checkpoint(
        _under_function_modes(function),
        *args,
        context_fn=_contexts(context_fn, keep_core_attn=keep_core_attn),
        determinism_check=determinism_check,
        early_stop=early_stop,
        **kwargs,
    )


def _contexts(
    context_fn: Callable[[], ContextPair] | None, *, keep_core_attn: bool | Keep
) -> Callable[[], ContextPair] | None:
    """Return one context function for the caller's and the library's contexts, None without any."""
    # From outside to inside: rng replay, functional mappings (no in-place writes to inputs, because
    # the region runs twice), the caller's contexts, selective saving.
    contexts: list[Callable[[], ContextPair]] = []
    if context_fn is not None:
        contexts.append(context_fn)
    if callable(keep_core_attn):
        contexts.append(functools.partial(keeping_contexts, keep_core_attn))
    elif keep_core_attn and torch.compiler.is_compiling():
        contexts.append(compiled_contexts)
    elif keep_core_attn:
        contexts.append(functools.partial(keeping_contexts, OnDevice))
    if not torch.compiler.is_compiling():  # dynamo cannot trace custom context managers
        contexts.insert(0, functional_contexts)
        if parallel_state.rng_states():
            contexts.insert(0, replay_contexts)
    if not contexts:
        return None
    return functools.reduce(_both, contexts)


def _both(first: Callable[[], ContextPair], second: Callable[[], ContextPair]) -> Callable[[], ContextPair]:
    """Return a context function that nests the contexts of ``second`` inside those of ``first``."""
    return functools.partial(both_contexts, first, second)


class _Checkpointed:
    """A module's forward that runs under ``checkpoint``."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, **kwargs)


def _checkpointed(forward: Forward) -> Forward:
    """Return ``forward`` under ``checkpoint``, as a bound method.

    torch.compile guards on a replaced forward by identity, but on a bound method by the identity of
    its function. With partials each layer would get a separate graph, and the ninth layer would
    raise an error (``torch._dynamo.config.recompile_limit``).
    """
    return _Checkpointed(forward).run


def _under_function_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the function modes of this call, such as torch's default device.

    torch runs backward, and with it the recomputation, without these modes.
    """
    if torch.compiler.is_compiling():
        return function
    modes = overrides._get_current_function_mode_stack()
    if not modes:
        return function
    return functools.partial(_run_under, modes, function)


def _run_under(
    modes: Sequence[AbstractContextManager[Any]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run ``function`` inside those of ``modes`` that are not active."""
    active = overrides._get_current_function_mode_stack()
    with ExitStack() as stack:
        for mode in modes:
            if mode not in active:
                stack.enter_context(mode)
        return function(*args, **kwargs)


def apply_recompute(model: Recomputable, memory: MemoryConfig, *, keep: Keep | None = None) -> None:
    """Replace the forward of the modules that ``memory`` selects.

    Parameters and parameter names do not change.

    A second call replaces the first choice.

    Args:
        model: a model that lists its decoder layers and the modules that can be recomputed.
        memory: recompute options.
        keep: keeps the results of attention for the layers whose checkpoints are offloaded; None
            keeps them on the device.

    Raises:
        ValueError: ``recompute_num_layers`` exceeds the number of layers, or, for ``uniform``, does
            not divide it, or the recomputed layers have no module of a name.
    """
    require_recompute(model, memory)
    remove_recompute(model)
    if memory.recompute_granularity == "full":
        _apply_full(model.decoder_layers(), memory, keep)
    elif memory.recompute_granularity == "selective":
        named = _selected_modules(model, memory)
        _warn_if_useless(named, memory)
        for name in memory.recompute_modules or ():
            for module in named[name]:
                wrap_forward(module, "recompute", _checkpointed)


def require_recompute(model: Recomputable, memory: MemoryConfig) -> None:
    """Raise ``ValueError`` if ``apply_recompute`` cannot apply ``memory``; arguments and errors as there."""
    if memory.recompute_granularity is None:
        return
    backend.check_recompute()
    if memory.recompute_granularity == "selective":
        # A stage of a pipeline may lack modules that the layers of other stages have.
        elsewhere = getattr(model, "recompute_names_elsewhere", list)()
        _require_modules(_selected_modules(model, memory), memory, elsewhere)
        return
    stages = getattr(model, "stages", None)
    require_layers(memory, len(model.decoder_layers()), 1 if stages is None else len(stages.chunks))
    if memory.recompute_keep_core_attn:
        _require_keepable(model.recompute_modules()["core_attn"])


def _selected_modules(model: Recomputable, memory: MemoryConfig) -> Mapping[str, Sequence[nn.Module]]:
    """Return the model's modules by name; with ``block``, those of the first ``recompute_num_layers`` layers.

    Raises:
        ValueError: ``recompute_num_layers`` exceeds the number of layers.
    """
    named = model.recompute_modules()
    if memory.recompute_method is None:
        return named
    # A list of modules does not tell their layers: a layer may have two of a name, or none.
    layers = model.decoder_layers()
    first_layers = layers[: memory.num_selective_layers(len(layers))]
    inside = {id(module) for layer in first_layers for module in layer.modules()}
    return {name: [module for module in named[name] if id(module) in inside] for name in named}


def recomputes_parts(memory: MemoryConfig) -> bool:
    """Return whether a recomputed layer saves inner tensors.

    Recompute is then part of the compiled graph.
    """
    if memory.recompute_granularity == "full":
        return bool(memory.recompute_keep_core_attn)
    return memory.recompute_granularity == "selective"


def recompute_module(module: nn.Module) -> None:
    """Run one module under ``checkpoint``. A second call changes nothing."""
    backend.check_recompute()
    if not is_recomputed(module):
        wrap_forward(module, "recompute", _checkpointed)


def is_recomputed(module: nn.Module) -> bool:
    """Return whether recomputation replaced the forward of ``module``.

    It runs under ``checkpoint``, or the first layer of its chunk runs it (``is_passed_over``).
    """
    return is_wrapped(module, "recompute") or is_wrapped(module, "traced_recompute")


def is_passed_over(layer: nn.Module) -> bool:
    """Return whether ``layer`` returns its input; the first layer of its chunk runs it."""
    # Not the forward itself, which outer techniques may have wrapped.
    return _passing_on in (wrapper_of(layer, "recompute"), wrapper_of(layer, "traced_recompute"))


def layer_units(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the layers that run together: those of a recompute chunk, and every other one alone."""
    units: list[list[nn.Module]] = []
    for layer in layers:
        if is_passed_over(layer):
            units[-1].append(layer)
        else:
            units.append([layer])
    return units


def remove_recompute(model: Recomputable) -> None:
    """Undo ``apply_recompute`` and ``recompute_module`` on all layers and modules of ``model``.

    Other techniques, such as offloading, stay. Without recomputation this does nothing.
    """
    modules = list(model.decoder_layers())
    for named_modules in model.recompute_modules().values():
        modules += named_modules
    for module in modules:
        unwrap_forward(module, "recompute")
        unwrap_forward(module, "traced_recompute")


def _apply_full(layers: Sequence[nn.Module], memory: MemoryConfig, keep: Keep | None) -> None:
    """Checkpoint ``layers``, all of the model, in chunks of ``recompute_num_layers``.

    ``block`` recomputes the first ``recompute_num_layers`` layers one by one. ``uniform``
    recomputes all layers in chunks of ``recompute_num_layers`` layers, which saves one input per
    chunk. ``nested`` does so too, and also checkpoints each layer of a chunk separately.
    """
    recomputation = Recomputation.of(memory, len(layers))
    keeping = memory.layers_keeping_attention(len(layers))
    offloaded = memory.num_offloaded_layers(len(layers))
    for first in range(recomputation.first, recomputation.stop, recomputation.chunk):
        chunk = [layers[index] for index in recomputation.unit(first)]
        keep_core_attn: bool | Keep = first in keeping
        # ``keep`` is given if it is the checkpoints of the first layers that offload.
        if keep_core_attn and keep is not None and first < offloaded:
            keep_core_attn = keep
        _checkpoint_chunk(chunk, keep_core_attn=keep_core_attn, is_nested=recomputation.is_nested)


def _require_keepable(modules: Sequence[nn.Module]) -> None:
    """Raise ``ValueError`` if an attention implementation is not a single fused operator."""
    found = {str(getattr(module, "implementation", None)) for module in modules}
    if not found <= set(KEEPABLE_ATTENTION):
        raise ValueError(
            f"recompute_keep_core_attn needs attention by one fused operator, one of {list(KEEPABLE_ATTENTION)}, and "
            f"on backend {backend.name} it is {sorted(found)}: leave it out, or choose another attention_backend"
        )
    # The kernel is not run again, and would not draw the numbers of its dropout: what draws after it, such as
    # the dropout of hidden states, would get other numbers than in forward.
    rates = {float(getattr(module, "dropout", 0.0)) for module in modules}
    if any(rates):
        raise ValueError(
            f"recompute_keep_core_attn needs attention without dropout, and attention_dropout is {max(rates)}: leave "
            "it out, or set attention_dropout to 0"
        )


def _checkpoint_chunk(layers: list[nn.Module], *, keep_core_attn: bool | Keep, is_nested: bool) -> None:
    """Run the chunk under one checkpoint in its first layer; its other layers return their input.

    The model's loop over its layers stays as it is.

    Args:
        layers: consecutive layers.
        keep_core_attn: see ``checkpoint``.
        is_nested: also run each layer under a checkpoint. Backward of the chunk then runs the
            layers once to restore their inputs, which it keeps until the backward of each layer
            runs that layer again: one layer's activations exist at a time, for one more forward of
            all layers of the chunk but the last.
    """
    first_layer, *later_layers = layers
    later_forwards = [layer.forward for layer in later_layers]
    # A policy on operators sees nothing inside a compiled graph: this checkpoint must be traced
    # into it.
    technique: Technique = "recompute"
    if keep_core_attn:
        technique = "traced_recompute"
    wrapper = functools.partial(_checkpointed_chunk, later_forwards, keep_core_attn, is_nested)
    wrap_forward(first_layer, technique, wrapper)
    for layer in later_layers:
        wrap_forward(layer, technique, _passing_on)


def _checkpointed_chunk(
    later_forwards: Sequence[Forward], keep_core_attn: bool | Keep, is_nested: bool, forward: Forward
) -> Forward:
    """Return a forward that runs ``forward`` and then ``later_forwards`` under one checkpoint."""
    forwards = [forward, *later_forwards]
    # A checkpoint of one layer is the checkpoint of its chunk.
    if is_nested and later_forwards:
        forwards = [functools.partial(checkpoint, each) for each in forwards]
    run = functools.partial(_run_chunk, forwards)
    return functools.partial(checkpoint, run, keep_core_attn=keep_core_attn)


def _run_chunk(forwards: Sequence[Forward], hidden: Any, *context: Any) -> Any:
    for forward in forwards:
        hidden = forward(hidden, *context)
    return hidden


def _passing_on(forward: Forward) -> Forward:
    del forward
    return _pass_on


def _pass_on(hidden: Any, *context: Any) -> Any:
    del context
    return hidden


def _require_modules(named: Mapping[str, Sequence[nn.Module]], memory: MemoryConfig, elsewhere: Sequence[str]) -> None:
    """Raise ``ValueError`` if there is no module of a name, also not ``elsewhere``: nothing would be recomputed."""
    present = [name for name in named if named[name] or name in elsewhere]
    where = "this model"
    if memory.recompute_method is not None:
        where = f"this model's first recompute_num_layers {memory.recompute_num_layers} layers"
    for name in memory.recompute_modules or ():
        if name not in present:
            raise ValueError(f"recompute_modules entry {name!r} names no module of {where}: use any of {present}")


def _warn_if_useless(named: Mapping[str, Sequence[nn.Module]], memory: MemoryConfig) -> None:
    """Warn if only ``core_attn`` is recomputed and no layer materializes S x S scores."""
    implementations = {getattr(module, "implementation", None) for module in named["core_attn"]}
    if memory.recompute_modules == ("core_attn",) and "math" not in implementations:
        warnings.warn(
            f"recompute of core_attn saves no memory under attention {sorted(map(str, implementations))}: a fused "
            "kernel keeps no S x S tensor and recomputes by itself; name other recompute_modules or use "
            "recompute_granularity 'full'",
            stacklevel=3,
        )
