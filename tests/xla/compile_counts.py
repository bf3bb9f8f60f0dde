"""Runs the training program on torch_xla's own process group, and writes what each phase of the run compiled, as JSON.

``python -m tests.xla.compile_counts OUTPUT [--extract] --config FILE ...`` is one process in a world of one, set up as
on NeuronCores: the process group is torch_xla's, and collectives are part of the graphs, in groups of one rank, which
XLA:CPU can execute. The simulation with several ranks carries collectives through the host, outside the graphs, and so
cannot show that a collective between two steps makes the next step another graph. With ``--extract`` the pass that
collects graphs for ``neuron_parallel_compile`` comes first, in the same process: the run then finds them compiled.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch_xla.debug.metrics as metrics

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.certify.measure import hlo
from nxd_memopt.checkpoint import gather_full_tensor
from nxd_memopt.parallel_layers import coordination, random
from nxd_memopt.parallel_layers.utils import is_sharded
from nxd_memopt.training import loop
from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.runtime.distributed import init_distributed
from tests.xla.lint import unsupported

PHASES = ("held_out_loss", "run_step", "resume", "finish")
records: list[tuple[str, int]] = []


def compilations() -> int:
    """Graphs that this process has compiled so far."""
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def counted(name: str, function: Any) -> Any:
    """Return ``function`` with a record of what each call compiled, up to the execution of what it left pending."""

    def call(*arguments: Any, **options: Any) -> Any:
        before = compilations()
        result = function(*arguments, **options)
        records.append((name, compilations() - before))
        return result

    return call


def act_as_on_neuron_cores() -> None:
    """Put collectives into the graphs, also those of groups of one rank, where the backend leaves them out."""
    xm = backend._xm
    backend.is_simulated, backend.distributed_backend = False, "xla"
    own = [[0]]
    backend.all_reduce = lambda x, group, op="sum": xm.all_reduce(op, x, groups=own, pin_layout=False)
    backend.all_gather = lambda x, group: xm.all_gather(x, dim=0, groups=own, pin_layout=False)
    backend.reduce_scatter = lambda x, group: xm.reduce_scatter("sum", x, 1.0, 0, 1, groups=own, pin_layout=False)


def with_work_between_steps(step: Any) -> Any:
    """Return ``step`` followed by what may happen between two steps: an exchange of texts, the gather of a tensor."""

    def call(training: Any, *arguments: Any) -> Any:
        result = step(training, *arguments)
        counted("share_texts", coordination.share_texts)("a text")
        weight = next(param for param in training.model.parameters() if is_sharded(param))
        counted("gather_full_tensor", gather_full_tensor)(weight)
        return result

    return call


def graphs() -> list[str]:
    """Texts of all graphs that were compiled, from XLA's dumps."""
    files = xla_inspect.dump_directory().glob("*.before_optimizations.txt")
    return [file.read_text(encoding="utf-8") for file in files]


def extract(config: TrainConfig) -> list[tuple[str, int]]:
    """Return what the pass that collects graphs compiles."""
    os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] = "1"
    loop.run(config)
    del os.environ["NEURON_EXTRACT_GRAPHS_ONLY"]
    random.model_parallel_manual_seed(config.trainer.seed)
    extracted = list(records)
    records.clear()
    return extracted


def main(output: Path, arguments: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_PORT=port)
    os.environ.update(MASTER_ADDR="localhost", XLA_ALWAYS_ALLREDUCE="1")
    act_as_on_neuron_cores()
    for name in PHASES:
        setattr(loop, name, counted(name, getattr(loop, name)))
    for name in ("save", "after_step"):
        setattr(loop.Saver, name, counted(name, getattr(loop.Saver, name)))
    loop.DeferredMetrics.read = counted("read", loop.DeferredMetrics.read)
    extracts = arguments[0] == "--extract"
    # The gather between two steps has marks, which would end the graph of a collective that a step leaves behind.
    if not extracts:
        loop.run_step = with_work_between_steps(loop.run_step)
    config = parse_config(arguments[extracts:])
    init_distributed(config)
    extracted = extract(config) if extracts else []
    loop.run(config)
    texts = graphs()
    result = {
        "process_group": dist.get_backend(),
        "extracted": extracted,
        "phases": records,
        "graphs": sorted({hlo.fingerprint(text) for text in texts}),
        "unsupported": sorted({line for text in texts for line in unsupported(text)}),
    }
    output.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
