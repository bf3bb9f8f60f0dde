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
from nxd_memopt.memory.selective import KEEPABLE_ATTENTION, both_contexts, keeping_contexts
from nxd_memopt.memory.wrapping import Forward, Technique, is_wrapped, unwrap_forward, wrap_forward
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.mappings import functional_contexts
from nxd_memopt.parallel_layers.random import replay_contexts


class Recomputable(Protocol):
    """A model whose parts recomputation can name."""

    def decoder_layers(self) -> Sequence[nn.Module]:
        """The transformer layers, in order; each returns its first argument's successor."""
        ...

    def recompute_modules(self) -> Mapping[str, Sequence[nn.Module]]:
        """For each of ``config.RECOMPUTE_MODULES`` the modules of all layers that bear the name."""
        ...


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    keep_core_attn: bool = False,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], ContextPair] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function`` keeping only its inputs; backward runs it again with the same random numbers, in all streams.

    It takes the arguments of ``torch.utils.checkpoint.checkpoint``, on every backend. On XLA, where torch's function
    fails, optimization barriers separate the recomputation from the forward pass, which the compiler would otherwise
    merge it with. The result and its gradients equal those without recomputation bit for bit on a deterministic
    device.

    Args:
        function: called with ``args`` and ``kwargs``; on XLA it returns tensors in lists, tuples and dicts, and tensors
            with a history that it computes with are among its arguments.
        keep_core_attn: keep what fused attention kernels return, so that they do not run again.
        use_reentrant: accepted for compatibility: one implementation serves both, with keyword arguments, nested
            results and inputs that require no gradient.
        preserve_rng_state: accepted for compatibility: random numbers are always the same.
        context_fn: returns a context manager for the forward pass and one for the recomputation.
        determinism_check: ``"default"`` or ``"none"``: compare the recomputed tensors' shapes and dtypes with the
            first ones'. On XLA, those of the results.
        debug: False. torch's own function names the operators of both passes in errors, on CPU and CUDA.
        early_stop: stop the recomputation when all saved tensors are there; on XLA it runs to its end.

    Raises:
        ValueError: an option has another value; on XLA also when the compiler's flags would undo the recomputation:
            they must say ``-O1``.
    """
    del use_reentrant, preserve_rng_state
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check must be one of {list(_DETERMINISM_CHECKS)}, got {determinism_check!r}")
    if debug:
        raise ValueError("debug=True is not offered here: leave it out, or use torch.utils.checkpoint on CPU and CUDA")
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


def _contexts(given: Callable[[], ContextPair] | None, *, keep_core_attn: bool) -> Callable[[], ContextPair] | None:
    contexts = [given] if given is not None else []
    if keep_core_attn:
        contexts.append(keeping_contexts)
    if not torch.compiler.is_compiling():  # dynamo follows no contexts of our own
        contexts.insert(0, functional_contexts)
        if parallel_state.rng_states():
            contexts.insert(0, replay_contexts)
    if len(contexts) < 2:
        return contexts[0] if contexts else None
    return functools.reduce(_both, contexts)


def _both(first: Callable[[], ContextPair], second: Callable[[], ContextPair]) -> Callable[[], ContextPair]:
    return functools.partial(both_contexts, first, second)


_DETERMINISM_CHECKS = ("default", "none")


class _Checkpointed:
    """A module's forward, to be run under ``checkpoint``."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, **kwargs)


def _checkpointed(forward: Forward) -> Forward:
    """Return ``forward`` under ``checkpoint``, as a bound method.

    torch.compile guards on a replaced forward by identity, on a bound method by the identity of its function. With
    partials each layer would be a graph of its own, and the ninth an error (``torch._dynamo.config.recompile_limit``).
    """
    return _Checkpointed(forward).run


def _under_function_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let recomputation see what forward saw, such as torch's default device: torch runs backward without the modes."""
    modes = [] if torch.compiler.is_compiling() else overrides._get_current_function_mode_stack()
    return functools.partial(_run_under, modes, function) if modes else function


def _run_under(modes: Sequence[AbstractContextManager[Any]], function: Callable[..., Any], *args: Any, **kwargs: Any):
    active = overrides._get_current_function_mode_stack()
    with ExitStack() as stack:
        for mode in modes:
            if mode not in active:
                stack.enter_context(mode)
        return function(*args, **kwargs)


def apply_recompute(model: Recomputable, memory: MemoryConfig) -> None:
    """Replace the forward of the modules that ``memory`` names; parameters and their names stay as they are.

    Calling it again replaces the earlier choice.

    Raises:
        ValueError: ``recompute_num_layers`` exceeds, or for ``uniform`` does not divide, the number of layers.
    """
    remove_recompute(model)
    if memory.recompute_granularity is not None:
        backend.check_recompute()
    if memory.recompute_granularity == "full":
        if memory.recompute_keep_core_attn:
            _require_keepable(model.recompute_modules()["core_attn"])
        _apply_full(list(model.decoder_layers())[memory.cpu_offloading_num_layers :], memory)
    elif memory.recompute_granularity == "selective":
        named = model.recompute_modules()
        _warn_if_useless(named, memory)
        for name in memory.recompute_modules or ():
            for module in named[name]:
                wrap_forward(module, "recompute", _checkpointed)


def recomputes_parts(memory: MemoryConfig) -> bool:
    """Whether backward keeps something from inside a recomputed layer, which takes part in a compiled layer's graph."""
    return memory.recompute_granularity == "selective" or (
        memory.recompute_granularity == "full" and memory.recompute_keep_core_attn
    )


def recompute_module(module: nn.Module) -> None:
    """Let one module run under ``checkpoint``; calling it again changes nothing."""
    backend.check_recompute()
    if not is_recomputed(module):
        wrap_forward(module, "recompute", _checkpointed)


def is_recomputed(module: nn.Module) -> bool:
    """Whether ``module`` by itself runs under ``checkpoint``."""
    return is_wrapped(module, "recompute") or is_wrapped(module, "traced_recompute")


def is_passed_over(layer: nn.Module) -> bool:
    """Whether ``layer`` returns its input, because the first layer of its recomputed chunk runs it."""
    return layer.__dict__.get("forward") is _pass_on


def remove_recompute(model: Recomputable) -> None:
    """Undo ``apply_recompute``."""
    named = model.recompute_modules()
    for module in (*model.decoder_layers(), *(module for modules in named.values() for module in modules)):
        unwrap_forward(module, "recompute")
        unwrap_forward(module, "traced_recompute")


def _apply_full(layers: list[nn.Module], memory: MemoryConfig) -> None:
    num_layers = memory.recompute_num_layers or 1
    if not layers:
        raise ValueError("recompute_granularity 'full' is left no layer by cpu_offloading_num_layers: leave one out")
    if num_layers > len(layers):
        raise ValueError(f"recompute_num_layers {num_layers} exceeds the model's {len(layers)} layers: lower it")
    if memory.recompute_method == "block":
        layers, num_layers = layers[:num_layers], 1
    if len(layers) % num_layers:
        raise ValueError(
            f"{len(layers)} layers are not divisible by recompute_num_layers {num_layers}: "
            "use a divisor, or recompute_method 'block'"
        )
    for first in range(0, len(layers), num_layers):
        _checkpoint_chunk(layers[first : first + num_layers], keep_core_attn=memory.recompute_keep_core_attn)


def _require_keepable(modules: Sequence[nn.Module]) -> None:
    found = {str(getattr(module, "implementation", None)) for module in modules}
    if not found <= set(KEEPABLE_ATTENTION):
        raise ValueError(
            f"recompute_keep_core_attn needs attention by one fused operator, one of {list(KEEPABLE_ATTENTION)}, and "
            f"on backend {backend.name} it is {sorted(found)}: leave it out, or choose another attention_backend"
        )


def _checkpoint_chunk(layers: list[nn.Module], *, keep_core_attn: bool) -> None:
    """The chunk's first layer runs the whole chunk under one checkpoint, the others pass their input on."""
    first, *others = layers
    rest = [layer.forward for layer in others]
    technique: Technique = "traced_recompute" if keep_core_attn else "recompute"
    wrap_forward(first, technique, functools.partial(_checkpointed_chunk, rest, keep_core_attn))
    for layer in others:
        wrap_forward(layer, technique, _passing_on)


def _checkpointed_chunk(rest: Sequence[Forward], keep_core_attn: bool, forward: Forward) -> Forward:
    run = functools.partial(_run_chunk, [forward, *rest])
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


def _warn_if_useless(named: Mapping[str, Sequence[nn.Module]], memory: MemoryConfig) -> None:
    implementations = {getattr(module, "implementation", None) for module in named["core_attn"]}
    if memory.recompute_modules == ("core_attn",) and "math" not in implementations:
        warnings.warn(
            f"recompute of core_attn saves no memory under attention {sorted(map(str, implementations))}: a fused "
            "kernel keeps no S x S tensor and recomputes by itself; name other recompute_modules or use "
            "recompute_granularity 'full'",
            stacklevel=3,
        )
