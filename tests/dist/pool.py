"""Session-wide pools of worker processes (one process = one gloo rank) that distributed tests run on.

Usage::

    from tests.dist.pool import distributed, run_on_ranks

    @distributed(world_size=[2, 4])                      # one pytest case per world size; an int is fine too
    @pytest.mark.parametrize("bias", [False, True])
    def test_layer(bias):                                # the body runs on EVERY rank, with an initialised world
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        ...                                              # plain asserts; the first failing rank's traceback is raised

    def loss(path):                                      # module-level function of an importable tests.* module
        return ...
    values = run_on_ranks(loss, 4, "some/path")          # list with one return value per rank, by rank

Rules:

- The body must be a module-level function in a ``tests.`` package; ranks import it by name. Parametrised values and
  picklable fixtures (``tmp_path``) are sent through a pipe. A parameter called ``world_size`` is filled in.
- A body starts from: default process group = world of gloo ranks, no model-parallel groups
  (``parallel_state.destroy_model_parallel()`` was called), ``torch.manual_seed(SEED)``, one thread, float32 default.
- Every run proves that it used ``world_size`` distinct processes: ranks, world size, process ids and an all-reduce
  of one-hot rank vectors are checked by the parent.
- A rank that fails while others wait in a collective: after ``GRACE_S`` the pool is killed, the failure is raised,
  and the next test gets a fresh pool. ``@distributed(..., timeout_s=...)`` bounds the whole body (default
  ``TIMEOUT_S``); near the limit each rank prints its stack to stderr.
- Ranks have torchrun's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, and ``NXD_MEMOPT_BACKEND=cpu``
  unless the pytest process names another backend (tests/xla does).
- Single-process tests need nothing of this: ``torch.distributed`` is not initialised in the pytest process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

SEED = 1234
TIMEOUT_S = 120.0
GRACE_S = 5.0  # a rank that is merely slower than the failing one gets this long to finish or fail too
START_TIMEOUT_S = 120.0  # importing torch takes seconds, and more when all cores are busy

# Imported once, by the process that ranks are forked from: 2 seconds of torch and 8 of what most bodies use.
PRELOADED = ["tests.training.runs", "tests.reference_models", "nxd_memopt.training.loop", "torch._dynamo"]
PRELOADED += [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("llama", "gpt_neox", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
]

_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """A test body failed on a rank; the message carries that rank's traceback."""


@dataclass
class Report:
    """What one rank sends back after a body: its identity, and the value or the traceback."""

    rank: int
    world_size: int
    pid: int
    seen: list[int] = field(default_factory=list)  # sum over ranks of their one-hot vectors: [1] * world_size
    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Task:
    """A function, by name, and its arguments."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout_s: float


# ---- in the pytest process -------------------------------------------------------------------------------------------


def distributed(
    world_size: int | Sequence[int],
    *,
    slow: Sequence[int] = (),
    timeout_s: float = TIMEOUT_S,
) -> Callable[[Callable], Callable]:
    """Turn a function into a pytest test that runs it on every rank of each ``world_size``.

    Tests of the sizes ``slow`` are marked so.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Callable) -> Callable:
        names = list(inspect.signature(body).parameters)

        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            if "world_size" in names:
                kwargs["world_size"] = world_size
            _run(world_size, Task(body.__module__, body.__qualname__, (), kwargs, timeout_s))

        fixtures = ["world_size", *(name for name in names if name != "world_size")]
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures]
        )
        test.distributed_body = body
        params = [pytest.param(size, id=f"ranks{size}") for size in sizes]
        params += [pytest.param(size, id=f"ranks{size}", marks=pytest.mark.slow) for size in slow]
        return pytest.mark.parametrize("world_size", params)(test)

    return decorate


def run_on_ranks(body: Callable, world_size: int, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any) -> list[Any]:
    """Run ``body(*args, **kwargs)`` on ``world_size`` ranks; return its values by rank, or raise the first failure."""
    __tracebackhide__ = True
    return _run(world_size, Task(body.__module__, body.__qualname__, args, kwargs, timeout_s))


def _run(world_size: int, task: Task) -> list[Any]:
    __tracebackhide__ = True
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    reports = _pools[world_size].run(task)
    assert [report.rank for report in reports] == list(range(world_size)), f"ranks that ran: {reports}"
    assert all(report.world_size == world_size for report in reports), f"world sizes differ: {reports}"
    assert len({report.pid for report in reports}) == world_size, f"ranks shared a process: {reports}"
    assert all(report.seen == [1] * world_size for report in reports), f"ranks did not reach each other: {reports}"
    return [report.value for report in reports]


def close_all() -> None:
    """Stop every pool; the next test would start fresh ones."""
    while _pools:
        _pools.popitem()[1].close()


def _context() -> Any:
    """Return what starts processes. GPUs and torch_xla do not work in a fork of the process that imported them."""
    if os.environ.get("NXD_MEMOPT_BACKEND", "cpu") != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Pool:
    """``world_size`` persistent processes in one gloo world."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connections: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        context = _context()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker_main, args=(rank, world_size, self.store.port, theirs), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self._collect(START_TIMEOUT_S, "start")

    def run(self, task: Task) -> list[Report]:
        """Run a task on every rank; the pool is replaced after any failure, since its ranks may be out of step."""
        __tracebackhide__ = True
        payload = pickle.dumps(task)
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a dead rank is reported by _collect
                connection.send_bytes(payload)
        return self._collect(task.timeout_s, f"{task.module}.{task.name}")

    def _collect(self, timeout_s: float, what: str) -> list[Report]:
        __tracebackhide__ = True
        reports: dict[int, Report] = {}
        failures: list[Report] = []
        deadline = time.monotonic() + timeout_s
        while len(reports) < self.world_size:
            waiting = [c for rank, c in enumerate(self.connections) if rank not in reports]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(what, failures, reports, timeout_s)
            for connection in ready:
                report = self._receive(self.connections.index(connection))
                reports[report.rank] = report
                if report.error is not None:
                    failures.append(report)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._fail(what, failures, reports, timeout_s)
        return [reports[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> Report:
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(timeout=5)
            error = f"the process died with exit code {self.processes[rank].exitcode}"
            return Report(rank, self.world_size, self.processes[rank].pid or -1, error=error)

    def _fail(self, what: str, failures: list[Report], reports: dict[int, Report], timeout_s: float) -> NoReturn:
        __tracebackhide__ = True
        missing = sorted(set(range(self.world_size)) - set(reports))
        self.close(kill=True)
        stuck = f"; ranks {missing} did not finish (waiting in a collective?) and were killed" if missing else ""
        if not failures:
            raise RankError(f"{what} ran past {timeout_s:g} s on {self.world_size} ranks{stuck}") from None
        first = failures[0]
        others = sorted(report.rank for report in failures[1:])
        also = f"; ranks {others} failed too" if others else ""
        raise RankError(f"{what}: rank {first.rank} of {self.world_size} failed{also}{stuck}\n{first.error}") from None

    def close(self, *, kill: bool = False) -> None:
        """Stop the processes and forget the pool."""
        if _pools.get(self.world_size) is self:
            del _pools[self.world_size]
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()  # a rank that waits for a task leaves its loop
            if kill:
                process.kill()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


# ---- in the ranks ----------------------------------------------------------------------------------------------------


def reset_process(*, seed: int) -> None:
    """Drop model-parallel groups, if any were made, and put torch's global switches and random state back."""
    parallel_state = sys.modules.get("nxd_memopt.parallel_layers.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(seed)


def _worker_main(rank: int, world_size: int, port: int, connection: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
    os.environ.setdefault("NXD_MEMOPT_BACKEND", "cpu")
    torch.set_num_threads(1)
    gc.freeze()  # what the fork inherits is left out of collections, as what a rank imports
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    on_gpus = os.environ["NXD_MEMOPT_BACKEND"] == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    kind = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(kind, store=store, rank=rank, world_size=world_size)
    connection.send_bytes(pickle.dumps(Report(rank, world_size, os.getpid())))
    with contextlib.suppress(EOFError, OSError):  # the parent closed the pipe: the session is over
        while True:
            task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_run_task(task))


def _import(name: str) -> ModuleType:
    module = sys.modules.get(name)
    if module is None:
        module = importlib.import_module(name)
        # What imports made is left out of garbage collection, which took 0.5 s each time.
        gc.collect()
        gc.freeze()
    return module


def _run_task(task: Task) -> bytes:
    report = Report(dist.get_rank(), dist.get_world_size(), os.getpid())
    faulthandler.dump_traceback_later(task.timeout_s * 0.9)
    try:
        reset_process(seed=SEED)
        seen = torch.nn.functional.one_hot(torch.tensor(report.rank), report.world_size)
        dist.all_reduce(seen)
        report.seen = seen.tolist()
        body = getattr(_import(task.module), task.name)
        report.value = getattr(body, "distributed_body", body)(*task.args, **task.kwargs)
        return pickle.dumps(report)
    except BaseException:
        report.value, report.error = None, traceback.format_exc()
        return pickle.dumps(report)
    finally:
        faulthandler.cancel_dump_traceback_later()
