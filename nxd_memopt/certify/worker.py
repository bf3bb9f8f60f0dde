"""The measuring process: ``python -m nxd_memopt.certify.worker REQUEST.json ANSWER.json``.

It has a process of its own because the backend, and XLA's flags, are chosen once, at import.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.certify.measure import hlo
from nxd_memopt.certify.measure.baseline import without_recompute
from nxd_memopt.certify.measure.eager import measure_eager
from nxd_memopt.certify.measure.measurement import Measurement
from nxd_memopt.certify.measure.survival import Survival
from nxd_memopt.certify.measure.xla import measure_outputs
from nxd_memopt.certify.request import Answer, Request
from nxd_memopt.models import model_class
from nxd_memopt.modules.moe.gpt_neox_config import config_of
from nxd_memopt.ops.packed import PackedDocuments
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.utils import is_expert_parallel


def measure(request: Request) -> Answer:
    """Measure rank 0 at every depth, and take every rank's fingerprint at the smallest depth of such a run."""
    survivals = {}
    for layers in request.layer_counts:
        recompute = measure_variant(request, layers)
        with without_recompute():
            survivals[layers] = Survival(recompute, measure_variant(request, layers))
    # One rank's fingerprint is measured already. With more ranks each costs a trace, of one layer
    # or of the layers that are recomputed together: further layers repeat the same operations.
    size = num_ranks(request)
    few = request.memory.recompute_num_layers or 1
    if size == 1:
        fingerprints = [survivals[min(request.layer_counts)].recompute.fingerprint]
    else:
        # Traced for every rank, rank 0 included: a measured module has a marker in its graph
        # on XLA, so its fingerprint cannot be compared.
        fingerprints = [rank_fingerprint(request, few, rank) for rank in range(size)]
    return Answer(survivals, tuple(fingerprints), *count_parameters(request))


def num_ranks(request: Request) -> int:
    """Return the ranks whose graphs are compared: T, times EP data-parallel ranks with other experts."""
    parallel = request.parallel
    return parallel.tensor_model_parallel_size * parallel.expert_model_parallel_size


def measure_variant(request: Request, layers: int, rank: int = 0) -> Measurement:
    """Return the measurement of a rank's step, run or compiled by the request's backend."""
    if request.backend == "xla":
        with traced_step(request, layers, rank=rank) as outputs:
            return measure_outputs(outputs)
    # Eager steps run with fake tensors and a fake process group: operations are dispatched with
    # their shapes, but no memory is allocated and nothing is computed or sent.
    with pretended_world(request, rank=rank), FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = build(request, layers)
        return measure_eager(lambda: step(model, inputs))


def rank_fingerprint(request: Request, layers: int, rank: int) -> str:
    """Return the hash of the graph or of the operations of ``rank``."""
    if request.backend != "xla":
        return measure_variant(request, layers, rank).fingerprint
    with traced_step(request, layers, rank=rank) as outputs:
        return hlo.fingerprint(xla_inspect.traced_hlo(outputs))


@contextmanager
def traced_step(request: Request, layers: int, *, rank: int) -> Iterator[list[Tensor]]:
    """Yield loss and gradients of a step as ``rank`` traces it on XLA, before compilation."""
    # The rank is pretended twice: for torch_xla's own view of it, and for torch.distributed's.
    with ExitStack() as stack:
        stack.enter_context(xla_inspect.pretended_rank(num_ranks(request), rank))
        stack.enter_context(pretended_world(request, rank=rank))
        model, inputs = build(request, layers)
        yield step(model, inputs)


def step(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Run forward, backward and the sequence-parallel gradient hook; return loss and gradients.

    The optimizer does not run; ``certify.memory_terms.memory_terms`` adds its memory.
    """
    loss = model(**inputs).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    return [loss, *(param.grad for param in model.parameters() if param.grad is not None)]


@contextmanager
def pretended_world(request: Request, *, rank: int) -> Iterator[None]:
    """Simulate ``rank`` of the tensor- and expert-parallel ranks; collectives send nothing."""
    parallel = request.parallel
    world_size = num_ranks(request)
    if world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if world_size > 1:
            dist.destroy_process_group()


def build(request: Request, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of ``layers`` decoder layers with zero weights, and its inputs: zero ids ``[B, S]``."""
    model = _meta_model(request, layers)
    _materialize(model)
    ids = torch.zeros(request.micro_batch_size, request.sequence_length, dtype=torch.long)
    # The ids serve as labels too: the measurements depend on shapes, not on values.
    ids = ids.to(backend.device)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if request.isolate_documents:
        inputs["cu_seqlens"] = _two_documents_per_row(request)
    return model, inputs


def _two_documents_per_row(request: Request) -> PackedDocuments:
    """Return documents of which a second one starts in the middle of each row."""
    starts = torch.zeros(request.micro_batch_size, request.sequence_length, dtype=torch.bool)
    starts[:, request.sequence_length // 2] = True
    documents = PackedDocuments.from_starts(starts, 2 * request.micro_batch_size + 1)
    return documents.to(backend.device)


def count_parameters(request: Request) -> tuple[int, int]:
    """Return the number of parameters of rank 0 at full depth, and how many of them are experts'."""
    with pretended_world(request, rank=0):
        model = _meta_model(request, request.config["num_hidden_layers"])
        # parameters() yields a tied head and embedding once, as they are stored.
        params = list(model.parameters())
        experts = [param for param in params if is_expert_parallel(param)]
        return sum(param.numel() for param in params), sum(param.numel() for param in experts)


def _meta_model(request: Request, layers: int) -> nn.Module:
    """Return the model with ``layers`` decoder layers on the meta device, without memory."""
    config: Any = config_of({**request.config, "num_hidden_layers": layers})
    options: dict[str, Any] = {}
    if request.moe is not None:
        options["moe"] = request.moe
    return model_class(config.model_type)(
        config,
        parallel=request.parallel,
        memory=request.memory,
        dtype=getattr(torch, request.dtype),
        device="meta",
        **options,
    )


def _materialize(model: nn.Module) -> None:
    """Replace meta parameters and buffers with zeros on the backend's device.

    Tied parameters stay tied, and attributes of parameters, such as sharding, are copied.
    """
    # By the id of the meta parameter, so that modules which share one also share its replacement.
    materialized: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in materialized:
                materialized[id(param)] = _zeros_like(param)
            module._parameters[name] = materialized[id(param)]
        # The bias of a router, the only buffer that is built with the weights.
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype).to(backend.device)


def _zeros_like(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter of zeros on the backend's device, with the attributes of ``param``."""
    # Zeros are created on the host and copied: zeros created on an XLA device would be constants of
    # the graph instead of its inputs.
    zeros = torch.zeros(param.shape, dtype=param.dtype).to(backend.device)
    materialized = nn.Parameter(zeros)
    # A fake tensor has attributes of its own, such as its mode, which are not overwritten.
    attributes = vars(materialized)
    for key, value in vars(param).items():
        attributes.setdefault(key, value)
    return materialized


def main(run: Callable[[Request], Answer] = measure) -> None:
    """Read the request's file, measure, and write the answer's file."""
    request_file, answer_file = map(Path, sys.argv[1:])
    request = Request.from_json(json.loads(request_file.read_text(encoding="utf-8")))
    answer = run(request)
    answer_file.write_text(json.dumps(answer.to_json()), encoding="utf-8")
    if request.backend == "xla":
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would make torch_xla run the pending graphs, which were only traced.
        os._exit(0)


if __name__ == "__main__":
    main()
