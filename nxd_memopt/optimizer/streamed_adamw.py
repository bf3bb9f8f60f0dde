"""AdamW whose fp32 masters and moments wait in host memory and pass through the device in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import HostTransfers
from nxd_memopt.memory.chunk_stream import ChunkStream
from nxd_memopt.memory.host_limits import available_host_bytes
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.memory.paced_copies import PacedCopies
from nxd_memopt.ops.adamw import adamw_update, step_numbers
from nxd_memopt.ops.cuda import adamw as cuda
from nxd_memopt.ops.cuda.support import can_use_triton
from nxd_memopt.ops.param_remainders import REMAINDER, join, remainder_of
from nxd_memopt.optimizer.closures import loss_of
from nxd_memopt.parallel_layers.grads import gradient_of
from nxd_memopt.planner.sizes.states import (
    CHUNK_ELEMENTS,
    RESIDENT_ELEMENTS,
    optimizer_element_bytes,
    parameters_on_host,
    stream_slots,
)

OWNER = "optimizer states"
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names
_UNSUPPORTED_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that lies in one chunk.

    Attributes:
        index: number of the parameter.
        first: first element of the parameter.
        offset: its position in the chunk.
        length: number of elements.
    """

    index: int
    first: int
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """States that are updated together.

    Attributes:
        pieces: their parts of parameters, at least one.
        resident: bounds in the buffers on the device; None for a chunk of the stream.
        number: of a chunk of the stream.
    """

    pieces: list[Piece]
    resident: tuple[int, int] | None = None
    number: int | None = None


class PlacedStates:
    """Flat buffers of masters and both moments: of some parameters on the host, of the others on the device.

    Moments are fp32. Masters are fp32, or int16 with what they have beyond the bf16 parameters
    (``ops.param_remainders``). ``parameters_on_host`` says which are on the host. Small ones are not:
    a few vectors at the end of the order would keep the update of the first layers waiting for all
    others.

    Args:
        sizes: elements of each parameter.
        fraction: part of all elements that are on the host, in [0, 1], rounded up to a whole
            parameter.
        resident_elements: parameters of fewer elements stay on the device.
        param_remainders: keep remainders instead of masters.

    Attributes:
        element_bytes: bytes of an element's states.
        on_host: numbers of the parameters whose states are on the host.
        on_device: numbers of the parameters whose states are on the device.
        small: numbers of the parameters with fewer than ``resident_elements`` elements.
        host_elements: elements of the parameters ``on_host``.
        device_elements: elements of the parameters ``on_device``.

    Raises:
        ValueError: ``fraction`` is outside [0, 1].
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        fraction: float,
        resident_elements: int = RESIDENT_ELEMENTS,
        param_remainders: bool = False,
    ) -> None:
        chosen = parameters_on_host(sizes, fraction, resident_elements=resident_elements)
        self.sizes = list(sizes)
        self.param_remainders = param_remainders
        self.element_bytes = optimizer_element_bytes(param_remainders=param_remainders)
        self._dtypes = (torch.int16 if param_remainders else torch.float32, *(torch.float32 for _ in MOMENTS))
        self.small = {index for index, size in enumerate(sizes) if size < resident_elements}
        self.on_host: list[int] = []
        self.on_device: list[int] = []
        self._offsets: list[int] = []
        self.host_elements = self.device_elements = 0
        for index, size in enumerate(sizes):
            if index in chosen:
                self.on_host.append(index)
                self._offsets.append(self.host_elements)
                self.host_elements += size
            else:
                self.on_device.append(index)
                self._offsets.append(self.device_elements)
                self.device_elements += size
        self.host: list[Tensor] = []
        self.device: list[Tensor] = []

    def allocate(self, transfers: HostTransfers, pool: HostPool, *, streaming_bytes: int = 0) -> None:
        """Allocate the buffers, zeroed.

        Args:
            transfers: copies between device and host.
            pool: the ledger of host memory.
            streaming_bytes: device memory that the host's states will need on their way.

        Raises:
            ValueError: host or device have too little memory; the message has the required and the
                available bytes.
        """
        host_bytes = self.host_elements * self.element_bytes
        device_bytes = self.device_elements * self.element_bytes
        # Both before anything is allocated: page-locking 100 GB takes minutes.
        free_bytes = transfers.free_bytes()
        if device_bytes + streaming_bytes > free_bytes:
            raise ValueError(
                f"{OWNER} require {device_bytes + streaming_bytes} bytes of device memory ({device_bytes} for those "
                f"that stay there, {streaming_bytes} for those on their way), and {free_bytes} are available: raise "
                "optimizer_offload_fraction, or lower the memory for states on their way"
            )
        if host_bytes:
            pool.claim(host_bytes, OWNER)
            try:
                buffers = [transfers.host_buffer(self.host_elements * dtype.itemsize) for dtype in self._dtypes]
            except RuntimeError as error:
                pool.release(host_bytes, OWNER)
                raise ValueError(
                    f"{OWNER} require {host_bytes} bytes of page-locked host memory, and the system refused a buffer "
                    f"of up to {self.host_elements * torch.float32.itemsize} ({error}); {available_host_bytes()} bytes "
                    "are available: lower optimizer_offload_fraction, or raise the limit of locked memory (ulimit -l)"
                ) from error
            self.host = [buffer.view(dtype).zero_() for buffer, dtype in zip(buffers, self._dtypes, strict=True)]
        self.device = [torch.zeros(self.device_elements, dtype=each, device=transfers.device) for each in self._dtypes]

    def free(self, pool: HostPool) -> None:
        """Drop the buffers, which must not be in use, and the claim on host memory."""
        if self.host:
            pool.release(self.host_elements * self.element_bytes, OWNER)
        self.host = []
        self.device = []

    def of_parameter(self, index: int) -> list[Tensor]:
        """Return the master, or its remainder, and the moments of a parameter, 1-D views of the buffers."""
        buffers = self.host if index in self.on_host else self.device
        first = self._offsets[index]
        return [buffer[first : first + self.sizes[index]] for buffer in buffers]

    def device_bounds(self, index: int, chunk_elements: int) -> list[tuple[int, int]]:
        """Return the bounds of a parameter on the device in its buffers, ``chunk_elements`` at a time."""
        first = self._offsets[index]
        last = first + self.sizes[index]
        return list(pairwise([*range(first, last, chunk_elements), last]))

    def pieces(self, indices: Sequence[int], bounds: tuple[int, int]) -> list[Piece]:
        """Return the pieces of the parameters ``indices`` in the elements ``bounds`` of their buffers."""
        found = []
        for index in indices:
            begin = self._offsets[index]
            first = max(begin, bounds[0])
            last = min(begin + self.sizes[index], bounds[1])
            if first < last:
                found.append(Piece(index, first - begin, first - bounds[0], last - first))
        return found


class StreamedAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) on fp32 masters, of which a part is in host memory between updates.

    In ``step`` the chunks of the host's part pass through the device (``ChunkStream``): while one
    chunk is updated, later ones arrive and earlier ones return, 12 bytes per parameter in each
    direction, or 10 with remainders. Between two steps the first chunks of the next one arrive, during forward and
    backward. The arithmetic does not depend on the place: the results are equal bit by bit for
    every fraction.

    Each parameter of ``params`` is an fp32 master of ``states``, or with remainders its output; its
    gradient is the attribute ``main_grad``, a tensor on the device of any floating-point dtype,
    because ``grad`` must be on the device of the weight.

    Args:
        params: groups of weights; the groups together have them in the order of ``states``.
        states: the buffers.
        outputs: for each weight a tensor on the device that receives its values, of any dtype; bf16
            with remainders, which are added to its values in the next update.
        transfers: copies between device and host.
        staging_bytes: device memory for chunks on their way.
        defaults: options of ``torch.optim.AdamW``; ``amsgrad``, ``maximize``, ``capturable`` and
            ``differentiable`` are not supported, and ``fused`` has no effect.

    Raises:
        ValueError: an option is not supported.
    """

    def __init__(
        self,
        params: Any,
        *,
        states: PlacedStates,
        outputs: Sequence[Tensor],
        transfers: HostTransfers,
        staging_bytes: int,
        chunk_elements: int = CHUNK_ELEMENTS,
        **defaults: Any,
    ) -> None:
        super().__init__(params, **defaults)
        self._states = states
        # The weights in the order of ``states``, and the group of each one.
        self._weights: list[nn.Parameter] = []
        self._groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            for name in _UNSUPPORTED_OPTIONS:
                if group[name]:
                    raise ValueError(f"{name} {group[name]} is not supported with states in host memory: leave it out")
            self._weights += group["params"]
            self._groups += [group] * len(group["params"])
        self._outputs = [output.detach().view(-1) for output in outputs]
        # A model that is smaller than a chunk needs no buffers of a chunk's size.
        longest = max(states.host_elements, states.device_elements, 1)
        chunk_elements = min(chunk_elements, longest)
        chunks: list[Chunk] = []
        self._stream: ChunkStream | None = None
        if states.host:
            self._stream = ChunkStream(
                states.host,
                chunk_elements=min(chunk_elements, states.host_elements),
                slots=stream_slots(
                    min(chunk_elements, states.host_elements), staging_bytes, element_bytes=states.element_bytes
                ),
                transfers=PacedCopies(transfers),
            )
            bounds = [self._stream.bounds(chunk) for chunk in range(self._stream.num_chunks)]
            chunks = [Chunk(states.pieces(states.on_host, each), number=n) for n, each in enumerate(bounds)]
        self._small_chunks: list[Chunk] = []
        for index in states.on_device:
            into = self._small_chunks if index in states.small else chunks
            into += [Chunk(states.pieces([index], each), each) for each in states.device_bounds(index, chunk_elements)]
        # In the order of the parameters, so that the link works while the device updates what it has.
        self._chunks = sorted(chunks, key=lambda chunk: chunk.pieces[0].index)
        # Chunks that ``step`` updates itself, and those up to the last one of each unit of ``defer``.
        self._end_of_step = len(self._chunks)
        self._ends: list[int] = []
        # Chunks whose update of this step has not run yet, each weight's elements in them, and the
        # versions of each gradient at the step and of each output after its last update.
        self._pending: deque[Chunk] = deque()
        self._left: list[int] = []
        self._gradient_versions: dict[int, int] = {}
        self._output_versions: dict[int, int] = {}
        self.state = cast(Any, _StateViews(states, self._weights))
        self.grad_factor: Tensor | None = None
        """Factor of all gradients, such as clipping's, 0-dim fp32; None is 1."""
        self.on_update: Callable[[int], None] = lambda index: None
        """Called with the number of each weight when its update is queued."""

    def defer(self, units: Sequence[Collection[int]]) -> None:
        """Let ``step`` leave weights to later calls of ``finish``.

        Weights are updated in the order of their first use. Those in no unit, and small ones, are
        updated in ``step``.

        Args:
            units: numbers of the weights that are used together, in the order of use.
        """
        self.finish()
        first_use: dict[int, int] = {}
        for number, unit in enumerate(units):
            for index in unit:
                first_use.setdefault(index, number)
        # A chunk with parts of several weights is updated before the first of them is used.
        uses = [min(first_use.get(piece.index, -1) for piece in chunk.pieces) for chunk in self._chunks]
        order = sorted(range(len(uses)), key=uses.__getitem__)
        self._chunks = [self._chunks[each] for each in order]
        self._end_of_step = uses.count(-1)
        self._ends = []
        for unit in units:
            # One past the last chunk that has a part of the unit's weights.
            end = 0
            for position, chunk in enumerate(self._chunks, 1):
                if any(piece.index in unit for piece in chunk.pieces):
                    end = position
            self._ends.append(end)
        if self._stream is not None:
            self._stream.reorder([chunk.number for chunk in self._chunks if chunk.number is not None])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient; return what ``closure`` returns."""
        loss = loss_of(closure)
        self.finish()
        self._gradient_versions.clear()
        for index, weight in enumerate(self._weights):
            gradient = gradient_of(weight)
            if gradient is not None:
                self.state[weight]["step"] += 1
                self._gradient_versions[index] = gradient._version
                self._output_versions[index] = self._outputs[index]._version
        self._left = list(self._states.sizes)
        for chunk in self._small_chunks:
            self._update(chunk)
        self._pending.extend(self._chunks)
        self._finish_until(self._end_of_step)
        return loss

    @torch.no_grad()
    def finish(self, unit: int | None = None) -> None:
        """Queue the updates that ``step`` left, up to the weights of a unit of ``defer``; all without it.

        Gradients, learning rates and ``grad_factor`` must be those of ``step`` until then.

        Raises:
            RuntimeError: a gradient or an output was written to since ``step``.
        """
        self._finish_until(len(self._chunks) if unit is None else self._ends[unit])

    def _finish_until(self, end: int) -> None:
        """Queue the updates of the first ``end`` chunks that are left."""
        while len(self._chunks) - len(self._pending) < end:
            # Before the chunk is taken: after an error none of it is updated, and all of it is left.
            self._require_unchanged(self._pending[0].pieces)
            self._update(self._pending.popleft())

    def synchronize(self) -> None:
        """Wait until the buffers on the host have the results of the last step.

        Call it before they are read or written outside of ``step``.
        """
        self.finish()
        if self._stream is not None:
            self._stream.synchronize()

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state of ``torch.optim.AdamW`` into the buffers."""
        self.synchronize()
        # What is saved may be views of the buffers, as of ``state_dict()`` of this optimizer.
        views = cast(_StateViews, self.state)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for weight, index in zip(group["params"], saved["params"], strict=True):
                if index in state_dict["state"]:
                    views[weight] = state_dict["state"][index]
                else:
                    views.reset(weight)
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _update(self, chunk: Chunk) -> None:
        """Update the weights and moments of a chunk."""
        if chunk.resident is not None:
            start, stop = chunk.resident
            self._update_pieces(chunk.pieces, [buffer[start:stop] for buffer in self._states.device])
            return
        assert self._stream is not None
        self._update_pieces(chunk.pieces, self._stream.take())
        self._stream.give_back()

    def _update_pieces(self, pieces: Sequence[Piece], buffers: Sequence[Tensor]) -> None:
        """Update the pieces of one chunk, whose masters and moments are in ``buffers``."""
        for piece in pieces:
            gradient = gradient_of(self._weights[piece.index])
            if gradient is not None:
                self._update_piece(piece, gradient.view(-1), buffers)
                self._output_versions[piece.index] = self._outputs[piece.index]._version
            self._left[piece.index] -= piece.length
            if not self._left[piece.index]:
                self.on_update(piece.index)

    def _require_unchanged(self, pieces: Sequence[Piece]) -> None:
        """Raise ``RuntimeError`` if a gradient or an output of ``pieces`` was written to since ``step``."""
        for piece in pieces:
            gradient = gradient_of(self._weights[piece.index])
            if gradient is None:
                continue
            output = self._outputs[piece.index]
            version = self._output_versions[piece.index]
            if output._version != version:
                raise RuntimeError(
                    f"a parameter of {output.numel()} elements was written to (version {output._version}, "
                    f"{version} at the step) before its update, which was left to the next "
                    "forward and would overwrite it: call finish_update() before"
                )
            version = self._gradient_versions[piece.index]
            if gradient._version != version:
                raise RuntimeError(
                    f"a gradient of {gradient.numel()} elements was written to (version {gradient._version}, "
                    f"{version} at the step) before its update, which was left to the next "
                    "forward: call finish_update() before, or release gradients with zero_grad(set_to_none=True)"
                )

    def _update_piece(self, piece: Piece, gradient: Tensor, buffers: Sequence[Tensor]) -> None:
        inside = slice(piece.first, piece.first + piece.length)
        master, mean, square = [buffer[piece.offset : piece.offset + piece.length] for buffer in buffers]
        output = self._outputs[piece.index][inside]
        group = self._groups[piece.index]
        step = int(self.state[self._weights[piece.index]]["step"])
        if can_use_triton(mean):
            # One tensor a call needs no table on the device: its copy would wait for the chunks.
            update = cuda.Update(master, gradient[inside], mean, square, step, self.grad_factor, output)
            beta1, beta2 = group["betas"]
            options = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
            cuda.adamw_of_one(update, beta1=beta1, beta2=beta2, **options)
            # The kernel writes without autograd's knowledge.
            torch.autograd.graph.increment_version([master, mean, square, output])
            return
        # Cast and scaled in fp32, a chunk at a time: scaling bf16 gradients would round them.
        grad = gradient[inside].to(torch.float32, copy=True)
        if self.grad_factor is not None:
            grad.mul_(self.grad_factor)
        weight = join(output, master) if self._states.param_remainders else master
        numbers = step_numbers(step, weight, lr=group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])
        adamw_update(weight, grad, mean, square, numbers, betas=group["betas"], eps=group["eps"])
        output.copy_(weight)
        if self._states.param_remainders:
            master.copy_(remainder_of(weight, output))


class _StateViews(dict[nn.Parameter, dict[str, Any]]):
    """An optimizer's ``state`` whose moments, and remainders, are always views of the buffers.

    Assigning a state copies them into the buffers; ``clear`` starts again, with zeros.
    """

    def __init__(self, states: PlacedStates, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._states = states
        self._index = {id(weight): index for index, weight in enumerate(weights)}
        self._weights = weights
        self.clear()

    def __setitem__(self, weight: nn.Parameter, values: dict[str, Any]) -> None:
        state = self[weight]
        state["step"].fill_(float(values["step"]))
        for name in MOMENTS:
            state[name].copy_(values[name])
        if REMAINDER in values:
            state[REMAINDER].copy_(values[REMAINDER])

    def clear(self) -> None:
        for weight in self._weights:
            self.reset(weight)

    def reset(self, weight: nn.Parameter) -> None:
        """Start the state of one weight again, with zeros."""
        master, *moments = self._states.of_parameter(self._index[id(weight)])
        state = {"step": torch.zeros(()), **dict(zip(MOMENTS, moments, strict=True))}
        if self._states.param_remainders:
            state[REMAINDER] = master
        for name in state:
            if name != "step":
                state[name] = state[name].view(weight.shape).zero_()
        super().__setitem__(weight, state)
