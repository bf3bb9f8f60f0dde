"""Measures what a checkpoint written in the background adds to the training steps next to it.

    python -m scripts.bench.races.async_save --model smollm2-135m --saves 10 --sync-saves 3 --append
    NXD_MEMOPT_BACKEND=cuda python -m scripts.bench.races.async_save --model llama3.2-3b --tokens 8192 --accumulation 4

Random weights; AdamW states in the parameters' dtype (bf16 on GPUs, fp32 on CPUs). A step is timed
until the device has finished, including the call that starts a save if one is due. Each save is
followed by steps until it is complete, then by ``--between`` steps without a save.
``slowest_ratio`` and ``median_ratio`` compare steps during saves with the median of all other
steps. ``added_s`` is the additional time of the steps during one save, to compare with
``sync_save_s``, the time of a synchronous save. The last checkpoint is read back and compared
bitwise with copies made when it started.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, save_training_state
from nxd_memopt.checkpoint.layout import parts_of
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.sharded.logical import model_tensors, optimizer_tensors, parameter_names
from nxd_memopt.config import ParallelConfig
from nxd_memopt.memory import GraphedLoss
from nxd_memopt.models import model_class
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.record import append, bench_parser, environment
from scripts.bench.races.peers import dtype

WARM_UP_STEPS = 2


class Training:
    """Training of a model on random tokens, with timed steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        model_parallel_manual_seed(7)
        config = CONFIGS[args.model]()
        config.max_position_embeddings = args.tokens
        parallel = ParallelConfig(use_cpu_initialization=False)
        self.model = model_class(config.model_type)(config, parallel=parallel, dtype=dtype(), device=backend.device)
        self.model.train()
        # On GPUs the library's AdamW runs its one-pass kernel, which fused=True would replace with
        # torch's. It has no kernel for the CPU, where torch's fused step is the fastest.
        fused = None
        if backend.name == "cpu":
            fused = True
        self.optimizer = AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        # The ids are drawn on the CPU: the losses are then the same on every device.
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(config.vocab_size, (args.batch, args.tokens), generator=generator)
        self._ids = ids.to(backend.device)
        self._accumulation = args.accumulation
        self._forward_backward = self._choose(args.cuda_graph)
        self.state = TrainingState(self.model, self.optimizer)

    def _loss(self, ids: Tensor) -> Tensor:
        """Return the micro-batch's share of the step's loss, 0-dim."""
        return self.model(ids, labels=ids).loss / self._accumulation

    def _choose(self, cuda_graph: bool) -> Callable[[Tensor], Tensor]:
        """Return the forward and backward of a micro-batch, eager or as a CUDA graph."""

        def forward_backward(ids: Tensor) -> Tensor:
            loss = self._loss(ids)
            loss.backward()
            return loss.detach()

        if cuda_graph:
            return GraphedLoss(list(self.model.parameters()), self._loss)
        return forward_backward

    def step(self) -> None:
        """Run one optimizer step."""
        for _ in range(self._accumulation):
            self._forward_backward(self._ids)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(
        self,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> float:
        """Return the seconds of a step, with ``begin`` before it and ``end`` after it."""
        # Both calls are inside the timed interval: starting a save blocks the host while it queues
        # the copies, and that is part of what a save costs. The device is idle at both ends, so no
        # work of a neighbouring step is counted.
        backend.synchronize()
        start = time.perf_counter()
        begin()
        self.step()
        end()
        backend.synchronize()
        return time.perf_counter() - start

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        names = parameter_names(self.model)
        # The same functions that a save uses, so that this list has what a checkpoint has.
        logicals = [*model_tensors(self.model), *optimizer_tensors(self.optimizer, names)]
        return {logical.name: logical.stored for logical in logicals}


class Measurement:
    """Alternation of steps during saves and steps without saves."""

    def __init__(self, training: Training, args: argparse.Namespace, directory: Path) -> None:
        # Seconds: ``between`` of each step without a save, ``during`` of the steps of each save.
        self._training = training
        self._args = args
        self._directory = directory
        self._number = 0
        self.between: list[float] = []
        self.during: list[list[float]] = []
        self.save_s: list[float] = []
        self.begin_s: list[float] = []
        self.sync_s: list[float] = []
        self.expected: dict[str, Tensor] = {}

    def run(self) -> dict[str, Any]:
        """Run all saves and return the figures of the row."""
        training, args = self._training, self._args
        deadline = time.monotonic() + args.max_seconds
        for _ in range(WARM_UP_STEPS):
            training.step()
        with BackgroundSaver(self._directory, keep=1) as saver:
            started = time.perf_counter()
            saver.reserve(training.state)
            seconds = time.perf_counter() - started
            print(f"reserved {saver.pool.allocated_bytes} bytes in {seconds:.1f} s", flush=True)
            # The first step after the pool's allocations is slower: it is not counted.
            training.timed()
            self._steps_between()
            for i in range(args.saves):
                if time.monotonic() > deadline:
                    print(f"stopped after {i} saves: --max-seconds {args.max_seconds}", flush=True)
                    break
                # Only the last save is compared, because the copies need as much device memory as
                # the full training state. They are made before the save starts: training then
                # changes the tensors while the save reads its snapshot.
                if i == args.saves - 1:
                    tensors = training.tensors()
                    self.expected = {name: tensor.clone() for name, tensor in tensors.items()}
                self._save_in_background(saver)
                self._steps_between()
        self._require_exact()
        for _ in range(args.sync_saves):
            self._save_at_once()
            self._steps_between()
        return self._result(saver.pool.allocated_bytes)

    def _steps_between(self) -> None:
        """Time ``--between`` steps without a save."""
        self.between += [self._training.timed() for _ in range(self._args.between)]

    def _save_in_background(self, saver: BackgroundSaver) -> None:
        """Start a background save and time steps until it is complete."""
        self._number += 1
        started = time.perf_counter()

        def begin() -> None:
            saver.save(self._number, self._training.state, {})
            self.begin_s.append(time.perf_counter() - started)

        # The first of these steps starts the save. ``poll`` after each step is what the training
        # program does: it only asks whether the writer is done, and takes its result.
        steps = [self._training.timed(begin, saver.poll)]
        while saver.is_busy:
            steps.append(self._training.timed(end=saver.poll))
        self.save_s.append(time.perf_counter() - started)
        self.during.append(steps)
        times = [round(step, 3) for step in steps]
        seconds = f"{self.save_s[-1]:.1f} s, begin {self.begin_s[-1]:.3f} s"
        print(f"save {self._number}: {seconds}, steps {times}", flush=True)

    def _save_at_once(self) -> None:
        """Time a synchronous save."""
        self._number += 1
        backend.synchronize()
        started = time.perf_counter()
        state = self._training.state
        save_training_state(self._directory, self._number, state=state, config={}, keep=1)
        self.sync_s.append(time.perf_counter() - started)
        print(f"save {self._number}, waited for: {self.sync_s[-1]:.1f} s", flush=True)

    def _require_exact(self) -> None:
        """Compare the last background checkpoint with the copies made when it started.

        Raises:
            SystemExit: a tensor differs.
        """
        if not self.expected:
            return
        index = Index(next(self._directory.glob("step_*")))
        for name, expected in self.expected.items():
            stored = index.assemble(name, parts_of(expected), tuple(expected.shape))
            if not torch.equal(stored.to(expected.device), expected):
                raise SystemExit(f"error: {name} in {index.directory} is not what it was when the save began")
        print(f"{len(self.expected)} tensors of {index.directory.name} are what they were when the save began")

    def _result(self, pool_bytes: int) -> dict[str, Any]:
        """Return the figures of the row."""
        typical = statistics.median(self.between)
        during = [step for steps in self.during for step in steps]
        # Means on both sides: step times have a long upper tail, which a comparison with the median
        # of the other steps would count as added time.
        expected = statistics.fmean(self.between)
        added = statistics.fmean(sum(steps) - len(steps) * expected for steps in self.during)
        sync_s: float | str = ""
        if self.sync_s:
            sync_s = round(statistics.mean(self.sync_s), 3)
        return {
            "saves": len(self.during),
            "steps_during": len(during),
            "steps_others": len(self.between),
            "median_others_ms": round(typical * 1e3, 1),
            "median_during_ms": round(statistics.median(during) * 1e3, 1),
            "slowest_during_ms": round(max(during) * 1e3, 1),
            "slowest_others_ms": round(max(self.between) * 1e3, 1),
            "median_ratio": round(statistics.median(during) / typical, 3),
            "slowest_ratio": round(max(during) / typical, 3),
            "slowest_begin_ms": round(max(self.begin_s) * 1e3, 1),
            "save_s": round(statistics.mean(self.save_s), 2),
            "added_s": round(added, 3),
            "sync_save_s": sync_s,
            "state_gb": round(self._state_bytes() / 1e9, 2),
            "host_pool_gb": round(pool_bytes / 1e9, 2),
        }

    def _state_bytes(self) -> int:
        """Return the bytes of a checkpoint's tensors."""
        return sum(tensor.nbytes for tensor in self._training.tensors().values())


def argument_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, "async_save")
    parser.add_argument("--model", choices=CONFIGS, default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=126, help="S")
    parser.add_argument("--batch", type=int, default=1, help="B")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--sync-saves", type=int, default=0, help="saves that training waits for, for comparison")
    parser.add_argument("--between", type=int, default=4, help="steps without a save after each save")
    parser.add_argument("--max-seconds", type=float, default=3600, help="begin no further save after this time")
    parser.add_argument("--cuda-graph", action="store_true", help="forward and backward as one CUDA graph")
    parser.add_argument("--directory", type=Path, help="for the checkpoints; default a temporary one")
    parser.add_argument("--note", default="", help="recorded with the row, such as other load on the machine")
    return parser


def main() -> None:
    parser = argument_parser()
    args = parser.parse_args()
    for name in ("saves", "between", "tokens", "batch", "accumulation"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        measurement = Measurement(Training(args), args, Path(directory))
        # As the training program does: a full garbage collection, 0.2 s, would count as time of the
        # save that it happens to fall into.
        gc.freeze()
        result = measurement.run()
    row: dict[str, Any] = {
        "model": args.model,
        "backend": backend.name,
        "cuda_graph": args.cuda_graph,
        "tokens": args.tokens,
        "batch": args.batch,
        "accumulation": args.accumulation,
        **result,
        "note": args.note,
    }
    print(row)
    if args.append:
        append([row | environment()], args.csv)


if __name__ == "__main__":
    main()
