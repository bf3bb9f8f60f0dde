"""Points of a layer's backward at which memory may be highest, and the bytes of the tensors that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nxd_memopt.planner.sizes.rank_sizes import FP32_BYTES, RankSizes


@dataclass(frozen=True)
class Moment:
    """A point of a layer's backward.

    Args:
        name: what runs.
        temporary: temporary tensors.
        freed: storages of the layer that forward kept and that are free by now.
        finished_gradients: bytes of this layer's weight gradients that are complete, in the dtype
            of the weights, without the one in ``temporary``.
        before_attention: the attention of this layer has its backward later.
        returned: temporary tensors that the function that computes a weight's gradient returns.
    """

    name: str
    temporary: Mapping[str, int]
    freed: frozenset[str] = field(default_factory=frozenset)
    finished_gradients: int = 0
    before_attention: bool = False
    returned: frozenset[str] = field(default_factory=frozenset)


_FREED_WITH_NODE = frozenset(
    (
        *("gathered", "gathered gradient", "copied rows", "normalised", "inputs of the branches"),
        *("dA", "dA of the rows", "dQ, dK, dV", "gradient of expanded", "gradient of normalised", "dX * normalised"),
        *("gradients of the columns", "gradients of the rows", "tensors and gradients of the group"),
        *("dW in fp32", "parts of dW", "float8 operands"),
    )
)
"""Temporary tensors that are free when the function that has computed a weight's gradient returns."""
_FREED_LATER = frozenset({"mlp input", "mlp input in fp32", "mlp input normalised"})
"""Storages of the norm, whose backward follows."""


def with_fp32_sums(moments: Sequence[Moment], *, routes: bool) -> list[Moment]:
    """Return ``moments``, each that computes weight gradients followed by their cast to fp32 sums.

    The hooks that cast run as soon as the function has returned. By then its saved and temporary tensors are
    freed; its outputs are still alive.

    Args:
        moments: the moments in their order.
        routes: a router, whose backward follows the backward of the experts, has the same input.
    """
    freed_later = _FREED_LATER
    if routes:
        freed_later |= {"normed mlp input"}
    found: list[Moment] = []
    for i, moment in enumerate(moments):
        found.append(moment)
        weight = moment.temporary.get("dW", 0)
        if not weight:
            continue
        freed_names = _FREED_WITH_NODE - moment.returned
        temporary = {name: size for name, size in moment.temporary.items() if name not in freed_names}
        freed = moment.freed
        if i + 1 < len(moments):
            freed |= moments[i + 1].freed - freed_later
        finished = moment.finished_gradients + weight
        found.append(
            replace(moment, name=f"{moment.name}, sums", temporary=temporary, freed=freed, finished_gradients=finished)
        )
    return found


class LayerBytes:
    """Bytes of the tensors that several moments have in common."""

    def __init__(self, sizes: RankSizes) -> None:
        element = sizes.element_bytes
        self.stream = sizes.shard_tokens * sizes.hidden * element
        self.full = sizes.tokens * sizes.hidden * element
        # Sequence parallelism gathers a copy; without it every rank has all tokens.
        self.gathered = self.full * int(sizes.shards > 1)
        # A reduction over ranks writes its result next to the partial sum; in fp32 both are copies,
        # of which the result is cast back.
        self.reduced = self.stream * int(sizes.tensor_model_parallel_size > 1)
        if self.reduced and sizes.reduces_in_fp32 and element < FP32_BYTES:
            self.reduced += (self.stream + self.full) // element * FP32_BYTES
        self.query = sizes.tokens * sizes.query * element
        self.qkv = sizes.tokens * (sizes.query + 2 * sizes.kv) * element
        # Of experts: rows instead of tokens, k for each token, and the weights of all experts of the rank. A dense
        # MLP is the case of one row for each token and one weight.
        rows, width, num_weights = sizes.tokens, sizes.width, 1
        self.rows = 0
        self.expert_tokens = self.full
        self.gathered_gradient = self.gathered
        self.router = 0
        if sizes.moe is not None:
            rows, width, num_weights = sizes.moe.rows(sizes.tokens), sizes.moe.width, sizes.moe.local_experts
            self.rows = rows * sizes.hidden * element
            self.router = 3 * sizes.shard_tokens * sizes.moe.num_experts * sizes.moe.number_bytes
            # The gradient of the tokens of all expert-parallel ranks, before it is reduced.
            if sizes.moe.gathers_tokens:
                self.expert_tokens = sizes.moe.expert_ranks * self.full
                self.gathered_gradient = self.expert_tokens
        self.width = rows * width * element
        # Frozen weights have no gradient; what the backward of the adapters has is in ``adapters``.
        trains = int(sizes.adapters is None)
        self.adapters = _adapter_bytes(sizes)
        num_weights *= trains
        self.qkv_weight = trains * (sizes.query + 2 * sizes.kv) * sizes.hidden * element
        self.output_weight = trains * sizes.query * sizes.hidden * element
        self.width_weight = num_weights * width * sizes.hidden * element


def _adapter_bytes(sizes: RankSizes) -> int:
    """Return what the backward of a linear layer's adapters has besides the layer's own tensors.

    The gradients of the results of A, gathered, and of A and B. With dropout also the gradient of the adapter's input,
    which is added to the gradient of the layer's input, and the gradient of the dropped input; otherwise a matmul adds
    to the gradient of the layer's input.
    """
    if sizes.adapters is None:
        return 0
    widest = max(sizes.hidden, sizes.query, sizes.width)
    inputs = 3 * int(sizes.adapters.has_dropout) * sizes.tokens * widest
    factors = sizes.adapters.rank * (2 * sizes.tokens + sizes.hidden + widest)
    return (inputs + factors) * sizes.element_bytes
