"""neuronx-distributed's transfers between neighboring stages: tensors, and plain objects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.compat import parallel_state
from nxd_memopt.compat.pipeline.plain_objects import TensorMeta, from_text, to_text
from nxd_memopt.parallel_layers.parallel_state import (
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_next_rank,
    get_pipeline_model_parallel_prev_rank,
    get_pipeline_model_parallel_size,
    rmsg,
)

__all__ = ["recv_from", "recv_python_object", "rmsg", "send", "send_python_object"]


def send(tensor: Tensor, send_next: bool = True, all_reduce_send_recv: bool = False) -> Tensor:
    """Send ``tensor`` to the next stage, or the previous one, and return it. The last stage's next is the first.

    ``all_reduce_send_recv`` has no effect: the backend chooses how to transfer.
    """
    del all_reduce_send_recv
    message = (tensor.detach().contiguous(), _peer(send_next))
    backend.exchange([message], [], get_pipeline_model_parallel_group())
    return tensor


def recv_from(
    tensor_meta: TensorMeta, recv_prev: bool = True, tracing: bool = False, all_reduce_send_recv: bool = False
) -> Tensor:
    """Receive a tensor from the previous stage, or the next one.

    Args:
        tensor_meta: shape, dtype and ``requires_grad`` of the result.
        recv_prev: from the previous stage.
        tracing: no effect.
        all_reduce_send_recv: no effect.
    """
    del tracing, all_reduce_send_recv
    target = torch.empty(tensor_meta.shape, dtype=tensor_meta.dtype, device=backend.device)
    receives = [(target, _peer(not recv_prev))]
    (received,) = backend.exchange([], receives, get_pipeline_model_parallel_group())
    return received.requires_grad_(tensor_meta.requires_grad)


def _peer(is_next: bool) -> int:
    """Return the position in the pipeline of a neighbor."""
    step = 1 if is_next else -1
    return (parallel_state.get_pipeline_model_parallel_rank() + step) % get_pipeline_model_parallel_size()


def send_python_object(obj: Any, send_next: bool = True, method: str = "tcp") -> None:
    """Send a plain object to a neighbor, as JSON.

    Args:
        obj: see ``plain_objects.to_text``.
        send_next: to the next stage, or to the previous one.
        method: ``"tcp"``: the rendezvous's key-value store; ``"gloo"``: the groups of ``initialize_pp_gloo_groups``.

    Raises:
        TypeError: ``obj`` contains another object; the message names its class.
    """
    text = to_text(obj)
    peer = _neighbor(send_next)
    if method == "gloo":
        parallel_state.send_text(text, peer, parallel_state.get_pp_gloo_group())
        return
    store = parallel_state.get_tcp_store()
    store.set(_next_key(store, dist.get_rank(), peer, "sent"), text)


def recv_python_object(recv_prev: bool = True, method: str = "tcp") -> Any:
    """Receive the object that a neighbor sends; see ``send_python_object``."""
    peer = _neighbor(not recv_prev)
    if method == "gloo":
        return from_text(parallel_state.receive_text(peer, parallel_state.get_pp_gloo_group()))
    store = parallel_state.get_tcp_store()
    key = _next_key(store, peer, dist.get_rank(), "received")
    # The other stage may be compiling: the timeout is of that order, not of the store's answers.
    store.wait([key], timedelta(hours=1))
    text = store.get(key).decode()
    store.delete_key(key)
    return from_text(text)


def _neighbor(is_next: bool) -> int:
    """Return the global rank of a neighbor."""
    return get_pipeline_model_parallel_next_rank() if is_next else get_pipeline_model_parallel_prev_rank()


def _next_key(store: Any, source: int, target: int, side: str) -> str:
    """Return the store's key of the next message from ``source`` to ``target``; each side counts in the store."""
    prefix = f"nxd_memopt/stages/{source}_to_{target}"
    return f"{prefix}/{store.add(f'{prefix}/{side}', 1)}"
