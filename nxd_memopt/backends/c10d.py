"""Base of backends with a torch.distributed backend: process groups, checkpointing, compilation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from nxd_memopt.backends.base import Backend, ContextPair, Message
from nxd_memopt.backends.c10d_collectives import C10dCollectives
from nxd_memopt.backends.rank_wait import reported_wait


class C10dBackend(C10dCollectives, Backend):
    """Device whose process groups and collectives are torch.distributed's."""

    _timeout: timedelta | None = None  # of the collectives of all groups; None: the default

    def describe_overlap(self) -> str:
        return f"{self.distributed_backend}'s collectives start before the matmuls that do not need them"

    def all_to_all_rows(
        self, tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None
    ) -> Tensor:
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        dist.all_to_all_single(result, tensor.contiguous(), list(received), list(sent), group=group)
        return result

    def init_process_group(self, **kwargs: Any) -> None:
        if dist.is_initialized() or "RANK" not in os.environ:
            return
        self._timeout = kwargs.get("timeout")
        try:
            with reported_wait():
                dist.init_process_group(self.distributed_backend, **kwargs)
        except dist.DistNetworkError as error:
            # TCPStore names the error by its symbol with libuv, and by its text alone without
            message = str(error)
            if "EADDRINUSE" not in message and "address already in use" not in message.lower():
                raise
            port = os.environ.get("MASTER_PORT")
            raise ValueError(
                f"MASTER_PORT {port} is in use by another program: pass another --master_port to torchrun"
            ) from error

    def new_group(self, rank_groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
        # new_group is a collective of the world: each rank creates every group, in the same
        # order.
        mine = None
        for ranks in rank_groups:
            assert list(ranks) == sorted(ranks), (
                f"torch.distributed numbers a group's ranks in ascending order: {ranks}"
            )
            # an int where this rank is not a member; without a timeout the group has the default one
            group: Any = dist.new_group(list(ranks), timeout=self._timeout)
            if dist.get_rank() in ranks:
                mine = group
        return mine

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], group: ProcessGroup | None
    ) -> list[Tensor]:
        # One batch: NCCL runs it as one operation, in which no message waits for another one of the batch.
        operations: list[dist.P2POp] = []
        for function, messages in ((dist.isend, sends), (dist.irecv, receives)):
            operations += [dist.P2POp(function, tensor, group=group, group_peer=peer) for tensor, peer in messages]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()
        return [tensor for tensor, _ in receives]

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        context_fn: Callable[[], ContextPair] | None = None,
        determinism_check: str = "default",
        early_stop: bool = True,
        **kwargs: Any,
    ) -> Any:
        # Pass only options that differ from their defaults: dynamo does not trace the others.
        if context_fn is not None:
            kwargs["context_fn"] = context_fn
        if determinism_check != "default":
            kwargs["determinism_check"] = determinism_check
        if not early_stop:
            kwargs["early_stop"] = early_stop
        if args and isinstance(args[0], tuple):
            # torch saves the tensors among the arguments, and holds all else as it is. The tensors of a
            # layer's state would escape a checkpoint around this one, and hooks that offload.
            state = args[0]
            # A named tuple takes its values one by one. dynamo traces plain tuples only.
            make: Any = None if type(state) is tuple else getattr(type(state), "_make", None)
            run = _on_state(function, len(state), make)
            return checkpoint(run, *state, *args[1:], use_reentrant=False, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def compile_refusal(self) -> str | None:
        import torch._dynamo  # takes a second: import only when something is compiled

        # torch.compile would silently return the function itself
        if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return "needs torch.compile, which TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE turns off: unset it"
        return None

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile with Inductor, torch's default compiler."""
        # fullgraph: code that does not fit into one graph raises an error; it never runs eagerly.
        # dynamic=False: each new shape is a new graph with static shapes.
        return torch.compile(function, fullgraph=True, dynamic=False)


def _on_state(
    function: Callable[..., Any], length: int, make: Callable[[tuple[Any, ...]], Any] | None
) -> Callable[..., Any]:
    """Return ``function`` with its first argument, a tuple of ``length``, given as so many arguments.

    ``make`` returns the first argument of a tuple of its values; None leaves the tuple.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        state = args[:length]
        if make is not None:
            state = make(state)
        return function(state, *args[length:], **kwargs)

    return run
