"""Simulates ranks, streams, events and peer memory, so that every order in which GPUs may run can be tested.

Each rank's program only queues work, as on a GPU; ``play`` then runs the queues' heads in a random order that their
waits allow. Memory holds labels, and ``check`` says which must be there when the reading work runs.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

Program = Callable[[int, int, Any], None]


class Region:
    """A 1-D tensor: a part of a list."""

    dtype = "label"

    def __init__(self, world: World, memory: list[Any], start: int, stop: int) -> None:
        self._world, self._memory, self._start, self._stop = world, memory, start, stop
        self.shape, self.nbytes = (stop - start,), stop - start

    def size(self, dim: int) -> int:
        assert dim == 0
        return self.nbytes

    def numel(self) -> int:
        return self.nbytes

    def element_size(self) -> int:
        return 1

    def contiguous(self) -> Region:
        return self

    def __getitem__(self, part: slice) -> Region:
        start, stop, _ = part.indices(self.nbytes)
        return Region(self._world, self._memory, self._start + start, self._start + stop)

    def values(self) -> list[Any]:
        return self._memory[self._start : self._stop]

    def fill(self, values: list[Any]) -> None:
        self._memory[self._start : self._stop] = values

    def copy_(self, source: Region) -> Region:
        self._world.queue(lambda: self.fill(source.values()))
        return self

    def clone(self) -> Region:
        return Region(self._world, [None] * self.nbytes, 0, self.nbytes).copy_(self)


class Stream:
    def __init__(self, world: World) -> None:
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self._world = world

    def wait_event(self, event: Event) -> None:
        state = event.state
        self.work.append((lambda: state[0], lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._world)
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, world: World) -> None:
        self._world, self.state = world, [True]  # nothing to wait for before it is recorded

    def record(self, stream: Stream | None = None) -> None:
        state = self.state = [False]
        (stream or self._world.stream).work.append((lambda: True, lambda: state.__setitem__(0, True)))

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


class Slot:
    """What ``peer_memory._Slot`` offers; the n-th one that each rank makes belongs to the n-th of the others."""

    def __init__(self, world: World, size_bytes: int) -> None:
        self._world, self.size_bytes, self._rank = world, size_bytes, world.rank
        made = world.slots[world.rank]
        self._number = len(made)
        made.append(([None] * size_bytes, [0] * world.size))

    def of(self, rank: int, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        del dtype
        count = 1
        for length in shape:
            count *= length
        return _Late(self._world, rank, self._number, offset, offset + count)

    def signal(self, rank: int) -> None:
        def write() -> None:
            words = self._world.slots[rank][self._number][1]
            self._world.lost_signals += words[self._rank]
            words[self._rank] = 1

        self._world.queue(write)

    def barrier(self) -> None:
        """The n-th barrier of this rank is the n-th of every rank."""
        world, rank = self._world, self._world.rank
        world.barriers[rank] += 1
        number = world.barriers[rank]
        world.queue(lambda: world.arrived.append((number, rank)))
        world.stream.work.append((lambda: sum(n == number for n, _ in world.arrived) == world.size, lambda: None))

    def wait_for(self, ranks: Sequence[int]) -> None:
        words, awaited = self._world.slots[self._rank][self._number][1], list(ranks)

        def take() -> None:
            for rank in awaited:
                words[rank] = 0

        self._world.stream.work.append((lambda: all(words[rank] == 1 for rank in awaited), take))


class _Late(Region):
    """A region of a rank that may not have made its slot yet, while this rank queues work on it."""

    def __init__(self, world: World, rank: int, number: int, start: int, stop: int) -> None:
        self._place = rank, number
        super().__init__(world, [], start, stop)

    def __getitem__(self, part: slice) -> Region:
        start, stop, _ = part.indices(self.nbytes)
        return _Late(self._world, *self._place, self._start + start, self._start + stop)

    def values(self) -> list[Any]:
        rank, number = self._place
        return self._world.slots[rank][number][0][self._start : self._stop]

    def fill(self, values: list[Any]) -> None:
        rank, number = self._place
        self._world.slots[rank][number][0][self._start : self._stop] = values


class World:
    """``size`` ranks that each run ``program(rank, size, memory)``, ``memory`` being what ``new_memory`` makes."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.lost_signals = size, 0, 0
        self.wrong: list[tuple[Any, Any]] = []
        self.slots: list[list[tuple[list[Any], list[int]]]] = [[] for _ in range(size)]
        self.streams: list[list[Stream]] = [[] for _ in range(size)]
        self.stream = Stream(self)
        self.barriers = [0] * size
        self.arrived: list[tuple[int, int]] = []

    def queue(self, work: Callable[[], None]) -> None:
        self.stream.work.append((lambda: True, work))

    def new_stream(self, *args: Any, **kwargs: Any) -> Stream:
        del args, kwargs
        self.streams[self.rank].append(Stream(self))
        return self.streams[self.rank][-1]

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def torch(self) -> Any:
        """What ``peer_memory`` uses of torch."""
        cuda = SimpleNamespace(
            Stream=self.new_stream,
            Event=lambda: Event(self),
            current_stream=lambda device=None: self.stream,
            stream=self.on,
            set_stream=self.set_stream,
            is_current_stream_capturing=lambda: False,
            synchronize=lambda device: None,
        )
        return SimpleNamespace(cuda=cuda, inference_mode=lambda mode: contextlib.nullcontext())

    def made(self, values: list[Any]) -> Region:
        """A new tensor that the current stream's work makes."""
        region = Region(self, [None] * len(values), 0, len(values))
        self.queue(lambda: region.fill(values))
        return region

    def check(self, region: Region, expected: list[Any]) -> None:
        """Work of the current stream that reads ``region``."""

        def compare() -> None:
            if region.values() != expected:
                self.wrong.append((region.values(), expected))

        self.queue(compare)

    def run(self, program: Program, new_memory: Callable[[Any], Any]) -> None:
        for rank in range(self.size):
            self.rank = rank
            self.stream = self.new_stream()
            group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: self.size)
            program(rank, self.size, new_memory(group))

    def play(self, seed: int) -> int:
        """Run what is queued, some streams slower than others; the amount of work that can never run."""
        order = random.Random(seed)
        streams = [stream for own in self.streams for stream in own]
        speed = [order.choice((0.05, 1.0)) for _ in streams]
        while True:
            ready = [i for i, stream in enumerate(streams) if stream.work and stream.work[0][0]()]
            if not ready:
                return sum(len(stream.work) for stream in streams)
            (chosen,) = order.choices(ready, [speed[i] for i in ready])
            streams[chosen].work.popleft()[1]()
