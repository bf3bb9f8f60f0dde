"""Races implementations of linear layer + cross entropy on one device: values, gradients, time, memory over time.

    python -m scripts.bench.loss_race --batch 1 --seq-length 8192 --vocabulary 128256 --hidden 4096 \\
        --malek efficient_cross_entropy

The defaults are LLaMA-3-8B's head, on a CPU a small one. Memory is the peak without inputs, with
gradients; errors of gradients are relative in the 2-norm, against fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.profiler import profile

from nxd_memopt.backends import backend
from nxd_memopt.files import write_text
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy
from nxd_memopt.profiling.memory_summary import allocations, memory_summary
from nxd_memopt.profiling.operations import operations
from nxd_memopt.profiling.plots import draw_timelines
from nxd_memopt.profiling.step_profiler import profiled_activities
from nxd_memopt.profiling.tables import Cell, Quantity, Table

TURNS = 5
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative tolerance of loss and gradients by dtype: about four roundings of the dtype, and in fp32
what sums of different order differ by. The absolute one is it times the largest reference value."""
_MALEK_CHUNKS = 8
_REFERENCE_ROWS = 1024
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Builder = Callable[["Sizes"], Loss]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a race.

    Args:
        batch: B.
        sequence_length: S.
        vocabulary: V.
        hidden: H.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
    """

    batch: int
    sequence_length: int
    vocabulary: int
    hidden: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of hidden states and weight."""
        return getattr(torch, self.dtype)


def original(sizes: Sizes) -> Loss:
    """Return the head and the loss as transformers has them: all logits, in fp32."""
    del sizes
    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target)


def ours(sizes: Sizes) -> Loss:
    """Return this library's fused loss."""
    del sizes
    return lambda hidden, weight, target: fused_linear_cross_entropy(hidden, weight, target)


def liger(sizes: Sizes) -> Loss:
    """Return Liger-Kernel's fused loss.

    Raises:
        ImportError: it is not installed.
    """
    del sizes
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    criterion = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, target: criterion(weight, hidden, target)


def malek(directory: Path, sizes: Sizes) -> Loss:
    """Return the loss of a checkout of github.com/mgmalek/efficient_cross_entropy, in up to 8 chunks.

    Raises:
        ValueError: the directory has no ``modules.py``, or another one.
        ImportError: Triton is not installed.
    """
    file = directory / "modules.py"
    if not file.is_file():
        raise ValueError(f"--malek {directory} has no modules.py: name a checkout of mgmalek/efficient_cross_entropy")
    spec = importlib.util.spec_from_file_location("malek_modules", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "FusedProjectionPlusCrossEntropyLoss"):
        raise ValueError(f"{file} has no FusedProjectionPlusCrossEntropyLoss: name a checkout of its repository")
    tokens = sizes.batch * sizes.sequence_length
    # It needs chunks of equal lengths.
    chunks = next(count for count in range(min(_MALEK_CHUNKS, tokens), 0, -1) if tokens % count == 0)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.device("meta"):  # its own weight is replaced
            criterion = module.FusedProjectionPlusCrossEntropyLoss(sizes.hidden, sizes.vocabulary, chunks)
        criterion.proj_weight = weight
        return criterion(hidden, target)

    return loss


def competitors(malek_directory: Path | None) -> dict[str, Builder | str]:
    """Return the builder of each competitor by name, or why it does not take part."""
    found: dict[str, Builder | str] = {"original": original, "ours": ours, "Liger": liger}
    found["mgmalek"] = "--malek names no checkout"
    if malek_directory is not None:
        found["mgmalek"] = lambda sizes: malek(malek_directory, sizes)
    return found


def race_losses(sizes: Sizes, malek_directory: Path | None = None, turns: int = TURNS) -> dict[str, Any]:
    """Run forward and backward of every competitor on the same inputs.

    Args:
        sizes: sizes of hidden states and weight.
        malek_directory: checkout of mgmalek's repository.
        turns: measurements of each one's time, in turns; the median is returned.

    Returns:
        ``sizes``, ``device``; ``losses``: name -> ``loss``, ``loss_error``, relative errors
        ``dx_error`` and ``dw_error`` against fp32, ``allclose``, ``seconds``, ``peak_bytes`` and
        ``timeline``; ``absent``: name -> why it did not run.
    """
    hidden, weight, target = inputs(sizes)
    expected = reference(hidden, weight, target)
    results: dict[str, dict[str, Any]] = {}
    absent: dict[str, str] = {}
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, builder in competitors(malek_directory).items():
        if isinstance(builder, str):
            absent[name] = builder
            continue
        try:
            loss = builder(sizes)
            call = _forward_backward(loss, hidden, weight, target)
            results[name] = _errors(call(), hidden, weight, expected, TOLERANCES[sizes.torch_dtype])
        # A peer that is not installed, has no kernel for the device, or needs more memory than there is.
        except (ImportError, RuntimeError, AssertionError) as error:
            absent[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            hidden.grad = weight.grad = None
            continue
        calls[name] = call
    del expected
    for name, call in calls.items():
        results[name] |= _memory(call, hidden, weight)
    for name, seconds in _times(calls, hidden, weight, turns).items():
        results[name]["seconds"] = seconds
    return {"sizes": asdict(sizes), "device": backend.description(), "losses": results, "absent": absent}


def inputs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states ``[B*S, H]``, weight ``[V, H]`` and targets ``[B*S]``, of which one in ten is ignored."""
    generator = torch.Generator().manual_seed(5)
    tokens = sizes.batch * sizes.sequence_length
    hidden = torch.randn(tokens, sizes.hidden, generator=generator)
    weight = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator) * sizes.hidden**-0.5
    target = torch.randint(0, sizes.vocabulary, (tokens,), generator=generator)
    target[::10] = -100
    # A mean over no label would be NaN.
    target[-1] = sizes.vocabulary - 1
    moved = [tensor.to(backend.device, sizes.torch_dtype) for tensor in (hidden, weight)]
    return moved[0].requires_grad_(), nn.Parameter(moved[1]), target.to(backend.device)


def reference(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, dX and dW in fp32, of the inputs in their dtype, by chunks of tokens."""
    weights = weight.detach().float().requires_grad_()
    dx = torch.empty_like(hidden, dtype=torch.float32)
    total = torch.zeros((), device=hidden.device)
    count = (target >= 0).sum()
    for start in range(0, hidden.size(0), _REFERENCE_ROWS):
        rows = slice(start, start + _REFERENCE_ROWS)
        chunk = hidden.detach()[rows].float().requires_grad_()
        loss = F.cross_entropy(F.linear(chunk, weights), target[rows], reduction="sum") / count
        loss.backward()
        assert chunk.grad is not None
        dx[rows] = chunk.grad
        total += loss.detach()
    assert weights.grad is not None
    return total, dx, weights.grad


def _forward_backward(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Return a call that leaves the gradients in ``hidden`` and ``weight`` and returns the loss."""

    def call() -> Tensor:
        hidden.grad = weight.grad = None
        value = loss(hidden, weight, target)
        value.backward()
        return value.detach()

    return call


def _errors(
    value: Tensor, hidden: Tensor, weight: Tensor, expected: tuple[Tensor, Tensor, Tensor], tolerance: float
) -> dict[str, Any]:
    """Return the loss, and how far it and its gradients are from the reference."""
    assert hidden.grad is not None and weight.grad is not None
    found = (value.float(), hidden.grad.float(), weight.grad.float())
    is_close = [
        torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
        for one, other in zip(found, expected, strict=True)
    ]
    relative = [float((one - other).norm() / other.norm()) for one, other in zip(found[1:], expected[1:], strict=True)]
    return {
        "loss": float(value),
        "loss_error": abs(float(value) - float(expected[0])),
        "dx_error": relative[0],
        "dw_error": relative[1],
        "tolerance": tolerance,
        "allclose": dict(zip(("loss", "dx", "dw"), is_close, strict=True)),
    }


def _memory(call: Callable[[], Tensor], hidden: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return the peak of what one call allocates, gradients included, and the bytes over time."""
    if backend.allocations_refusal() is not None:
        return {"peak_bytes": None, "timeline": []}
    hidden.grad = weight.grad = None
    backend.synchronize()
    with profile(activities=profiled_activities(), profile_memory=True) as recorded:
        call()
        backend.synchronize()
    kind = backend.device.type
    memory = memory_summary(allocations(operations(recorded, kind), {}, {}, 0), None, "")
    timeline = memory["timeline"]
    totals = [sum(sizes) for sizes in zip(*timeline["bytes"].values(), strict=True)]
    return {"peak_bytes": memory["peak_bytes"], "timeline": list(zip(timeline["time_s"], totals, strict=True))}


def _times(calls: dict[str, Callable[[], Tensor]], hidden: Tensor, weight: Tensor, turns: int) -> dict[str, float]:
    """Return the median seconds of each call, taken in turns: a change of the clock rate affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()
            backend.synchronize()
            start = perf_counter()
            call()
            backend.synchronize()
            seconds[name].append(perf_counter() - start)
    hidden.grad = weight.grad = None
    return {name: statistics.median(measured) for name, measured in seconds.items()}


def race_table(result: dict[str, Any]) -> Table:
    """Return the race as a table, the fastest first."""
    columns = ("loss", "time", "peak memory", "value", "|error|", "dX error", "dW error", "allclose")
    rows: list[tuple[Cell, ...]] = []
    for name, each in sorted(result["losses"].items(), key=lambda item: item[1]["seconds"]):
        peak: Cell = "not reported" if each["peak_bytes"] is None else Quantity(each["peak_bytes"], "MiB")
        wrong = [part for part, is_close in each["allclose"].items() if not is_close]
        verdict = f"within {each['tolerance']:g}" if not wrong else f"not {', '.join(wrong)} ({each['tolerance']:g})"
        errors = [f"{each[part]:.2e}" for part in ("loss_error", "dx_error", "dw_error")]
        rows.append((name, Quantity(each["seconds"], "ms"), peak, f"{each['loss']:.6f}", *errors, verdict))
    return Table("Forward and backward of linear layer + cross entropy", columns, rows)


def write_race(directory: Path, result: dict[str, Any]) -> list[str]:
    """Write ``race.json``, and ``race.png`` where memory was counted; return the race as text."""
    directory.mkdir(parents=True)
    timelines = {name: each["timeline"] for name, each in result["losses"].items() if each["timeline"]}
    if timelines:
        draw_timelines(timelines, directory / "race.png", "memory of forward and backward")
    write_text(directory / "race.json", json.dumps(result, indent=1))
    sizes = result["sizes"]
    # Losses that did not run are named, so that a short table is no silent one.
    return [
        f"B={sizes['batch']}, S={sizes['sequence_length']}, V={sizes['vocabulary']}, H={sizes['hidden']}, "
        f"{sizes['dtype']}, {result['device']}",
        *(f"{name} does not take part: {reason}" for name, reason in result["absent"].items()),
        "",
        *race_table(result).lines(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # LLaMA-3-8B's head at its context length; on a CPU what takes seconds.
    small = backend.name == "cpu"
    dtypes = [str(dtype).removeprefix("torch.") for dtype in TOLERANCES]
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=512 if small else 8192)
    parser.add_argument("--vocabulary", type=int, default=8000 if small else 128256)
    parser.add_argument("--hidden", type=int, default=256 if small else 4096)
    parser.add_argument("--dtype", choices=dtypes, default="float32" if small else "bfloat16")
    parser.add_argument("--turns", type=int, default=TURNS, help="measurements of each loss")
    parser.add_argument("--malek", metavar="DIRECTORY", type=Path, help="checkout of mgmalek/efficient_cross_entropy")
    parser.add_argument("--output", type=Path, default=Path("loss-race"), help="new directory for race.json and plot")
    options = parser.parse_args()
    sizes = Sizes(options.batch, options.seq_length, options.vocabulary, options.hidden, options.dtype)
    print("\n".join(write_race(options.output, race_losses(sizes, options.malek, options.turns))))


if __name__ == "__main__":
    main()
