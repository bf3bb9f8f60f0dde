"""Sizes that determine the collectives of a training step, of a model or of a rank's sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import parameters
from nxd_memopt.config import MemoryConfig
from nxd_memopt.planner.memory.layer_tensors import layer_runs, merges_branches
from nxd_memopt.planner.sizes.rank_sizes import RankSizes
from nxd_memopt.planner.techniques.peer_slots import loss_chunks
from nxd_memopt.planner.timing.collectives import StepShape


def step_shape(spec: ModelSpec, sizes: RankSizes, memory: MemoryConfig) -> StepShape:
    """Return the sizes of a training step, with all collectives.

    Args:
        spec: the model.
        sizes: sizes of the rank's tensors.
        memory: parts of a layer that are recomputed separately.

    Raises:
        ValueError: tiles or groups of heads.
    """
    for name in ("mlp_tile_tokens", "attention_head_groups"):
        value = getattr(memory, name)
        if value is not None:
            raise ValueError(f"{name} {value!r}: the collectives of tiles and groups are not planned: leave it out")
    # With T greater than the number of KV heads g, r = T / g ranks have a replica of each KV head
    # and all-reduce its gradients. GPT-NeoX has no grouped-query attention, so r = 1.
    replicas = spec.kv_replicas(sizes.tensor_model_parallel_size)
    tagged: list[int] = []
    kv_gradients: list[int] = []
    for parameter in parameters(spec):
        # Without SP the rank has all tokens, but of the heads still its own only.
        is_partial = parameter.is_head_partial
        if sizes.shards > 1:
            is_partial = parameter.is_sequence_partial
        if is_partial:
            tagged.append(math.prod(parameter.shape) * sizes.element_bytes)
        # Layer 0 stands for every layer: their parameters have equal shapes.
        if replicas > 1 and parameter.sharding == "kv_column" and ".layers.0." in parameter.name:
            local = parameter.local_shape(sizes.tensor_model_parallel_size, replicas)
            kv_gradients.append(math.prod(local) * sizes.element_bytes)
    return replace(
        micro_batch_shape(sizes, memory),
        kv_replicas=replicas,
        kv_gradient_bytes=tuple(kv_gradients),
        tagged_gradient_bytes=tuple(tagged),
        # The ranges are of local rows; SP gathers the rows of all T ranks into each chunk.
        head_chunks=tuple((stop - start) * sizes.shards for start, stop in loss_chunks(sizes)),
    )


def micro_batch_shape(sizes: RankSizes, memory: MemoryConfig) -> StepShape:
    """Return the sizes of a micro-batch of one rank, of which a planned time needs the bytes of collectives.

    The gradients of norms and of replicated KV heads are left out: they are a thousandth of the
    activations, and the gradients of norms are summed once a step. Experts without padding get the rows of a balanced
    routing.

    Args:
        sizes: sizes of the rank's tensors.
        memory: recompute, tiles and groups of heads.

    Raises:
        ValueError: recompute does not fit the number of layers.
    """
    num_groups = 0
    if isinstance(memory.attention_head_groups, int):
        num_groups = memory.attention_head_groups
    blocks: list[int] = []
    for count, techniques in layer_runs(memory, sizes.num_layers):
        each = 1 + max(1, num_groups)
        # models/gpt_neox.py merges in training without dropout after the branches.
        if merges_branches(sizes, techniques):
            each = 1
        blocks += [each] * count
    # The bytes of all chunks of the loss together do not depend on the number of chunks.
    tiles_mlp = memory.mlp_tile_tokens is not None
    chunks = (sizes.tokens,) if sizes.has_head else ()
    return StepShape(sizes, tuple(blocks), num_groups, tiles_mlp, head_chunks=chunks)
