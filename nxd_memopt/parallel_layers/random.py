"""Random streams under tensor parallelism: one replicated over the ranks, one per rank.

Dropout on replicated activations must be equal on all tensor-parallel ranks: it draws from the
device's default generator, which is seeded equally. Dropout on shards (attention heads, sequence
shards) must differ between ranks: it draws inside ``fork()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.backends.base import ContextPair
from nxd_memopt.ops.autograd import ReusableContext
from nxd_memopt.parallel_layers import parallel_state

MODEL_PARALLEL_STREAM = "model-parallel-rng"
_TENSOR_PARALLEL_OFFSET = 2718  # as in Megatron-LM and neuronx-distributed
_STAGE_OFFSET = 100


class RNGStatesTracker:
    """Named random streams of the device generator; ``parallel_state`` stores their states."""

    def add(self, name: str, seed: int) -> None:
        """Create the stream ``name`` with ``seed``; the device generator is left unchanged."""
        # A stream is a saved state of the one device generator: seed it, take the state, restore
        # it.
        before = backend.get_rng_state()
        backend.manual_seed(seed)
        parallel_state.rng_states()[name] = backend.get_rng_state()
        backend.set_rng_state(before)

    def get_states(self) -> dict[str, Tensor]:
        return dict(parallel_state.rng_states())

    def set_states(self, states: dict[str, Tensor]) -> None:
        current = parallel_state.rng_states()
        current.clear()
        current.update(states)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the stream ``name`` inside the block; then restore the default generator.

        Raises:
            RuntimeError: the stream was never seeded, so all ranks would draw the same numbers.
        """
        states = parallel_state.rng_states()
        if name not in states:
            raise RuntimeError(f"random stream {name!r} is not seeded: call model_parallel_manual_seed(seed) first")
        # The stream continues where its last block ended, also if this block raises; the default
        # generator, which all tensor-parallel ranks share, does not see the draws.
        before = backend.get_rng_state()
        backend.set_rng_state(states[name])
        try:
            yield
        finally:
            states[name] = backend.get_rng_state()
            backend.set_rng_state(before)


def get_rng_tracker() -> RNGStatesTracker:
    return RNGStatesTracker()


def model_parallel_manual_seed(seed: int, *, per_stage: bool = False) -> None:
    """Seed all random streams of this rank.

    The replicated stream, on host and device, gets ``seed``. This rank's own stream gets
    ``seed + 2718 + tensor-parallel rank``.

    Args:
        seed: the same on every rank.
        per_stage: add 100 for each stage before this rank's (Megatron's numbers), so that layers of different stages
            have different dropout masks. Without it initial weights do not depend on the stages.
    """
    if per_stage:
        seed += _STAGE_OFFSET * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    backend.manual_seed(seed)
    rank = parallel_state.get_tensor_model_parallel_rank()
    get_rng_tracker().add(MODEL_PARALLEL_STREAM, seed + _TENSOR_PARALLEL_OFFSET + rank)


model_parallel_xla_manual_seed = model_parallel_manual_seed
get_xla_rng_tracker = get_rng_tracker


def random_states() -> dict[str, Any]:
    """Return the states of all random streams of this rank: of the host, the device, and the named streams."""
    return {
        "host": torch.get_rng_state(),
        "device": backend.get_rng_state(),
        "tracker": get_rng_tracker().get_states(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that ``random_states`` returned."""
    torch.set_rng_state(states["host"])
    backend.set_rng_state(states["device"])
    get_rng_tracker().set_states(states["tracker"])


@contextmanager
def fork_if(condition: bool) -> Iterator[None]:
    """Enter ``get_rng_tracker().fork()`` if ``condition`` is True, else do nothing."""
    if condition:
        with get_rng_tracker().fork():
            yield
    else:
        yield


def replay_contexts() -> ContextPair:
    """Return contexts for a forward pass and its recomputation that draw the same numbers.

    They handle the tracker's streams; the backend's ``checkpoint`` handles the default generator.
    """
    # Recorded when forward begins and restored for the recomputation. Afterwards the streams
    # continue from their state in backward: the recomputed draws happened once in the sequence,
    # not twice.
    tracker = get_rng_tracker()
    at_forward: dict[str, Tensor] = {}

    @contextmanager
    def record() -> Iterator[None]:
        at_forward.update(tracker.get_states())
        yield

    @contextmanager
    def replay() -> Iterator[None]:
        now = tracker.get_states()
        tracker.set_states(at_forward)
        try:
            yield
        finally:
            tracker.set_states(now)

    return ReusableContext(record), ReusableContext(replay)
