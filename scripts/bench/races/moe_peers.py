"""Experts of other projects for the race of one layer, with the weights of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend

CHECKOUTS = ("scattermoe", "sonicmoe")
"""Peers that are imported from a checkout of their repository."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: hidden size, width of an expert, experts, experts of a token."""

    hidden: int
    width: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Variant:
    """Experts of one layer, built without a router.

    Args:
        run: returns the output, ``[N, H]``, of tokens ``[N, H]``, weights ``[N, k]`` in fp32 and
            chosen experts ``[N, k]``.
        gate_up: gate and up projections, ``[E, 2 F, H]``.
        down: down projections, ``[E, H, F]``.
        rows: ``[2 F]``, the row of ``gate_up`` in our order, which has the gate's rows before those
            of up; None for the same order.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    gate_up: nn.Parameter
    down: nn.Parameter
    rows: Tensor | None = None

    @torch.no_grad()
    def load(self, gate_up: Tensor, down: Tensor) -> None:
        """Copy weights in our order."""
        self.gate_up.copy_(gate_up if self.rows is None else gate_up[:, self.rows])
        self.down.copy_(down)

    def in_our_order(self, gate_up: Tensor) -> Tensor:
        """Return ``gate_up`` or its gradient with the rows in our order."""
        if self.rows is None:
            return gate_up
        return gate_up[:, self.rows.argsort()]


def hf(shape: Shape, *, compiles: bool) -> Variant:
    """Return transformers' experts with its implementation ``grouped_mm``."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(backend.device):
        experts = MixtralExperts(config).to(torch.bfloat16)
    function: Any = torch.compile(experts) if compiles else experts

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        # As transformers' routers pass the weights: in the dtype of the tokens.
        return function(x, chosen, weights.to(x.dtype))

    return Variant(run, cast(nn.Parameter, experts.gate_up_proj), cast(nn.Parameter, experts.down_proj))


def scattermoe(shape: Shape, *, checkout: Path | None) -> Variant:
    """Return ScatterMoE's gated MLP."""
    _find("scattermoe", checkout)
    from scattermoe.mlp import GLUMLP  # pyright: ignore[reportMissingImports]

    with torch.device(backend.device):
        experts: Any = GLUMLP(shape.hidden, shape.width, shape.experts, shape.top_k).to(torch.bfloat16)

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        # Weights and outputs of experts are operands of one matmul, which needs equal dtypes.
        return experts(x, weights.to(x.dtype), chosen)

    # The rows of up come before the gate's.
    rows = torch.arange(2 * shape.width, device=backend.device).roll(shape.width)
    return Variant(run, experts.experts.weight, experts.output_experts.weight, rows)


def sonicmoe(shape: Shape, *, checkout: Path | None) -> Variant:
    """Return the experts of SonicMoE's layer, which has its choice of experts inside."""
    _find("sonicmoe", checkout)
    # Its layer computes logits and their top k itself. What follows them is called here with the
    # choices and weights that all variants get.
    from sonicmoe import functional  # pyright: ignore[reportMissingImports]
    from sonicmoe.count_cumsum import count_cumsum  # pyright: ignore[reportMissingImports]
    from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"device": backend.device, "dtype": torch.bfloat16}
    gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.width, shape.hidden, **options))
    down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width, **options))
    stream = torch.cuda.current_stream().cuda_stream
    act = ActivationType.SWIGLU

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        tokens, top_k = chosen.shape
        indices = chosen.int()
        offsets = count_cumsum(indices.view(-1), shape.experts, do_cumsum=True)[1]
        offsets, gathered, scattered, inverse, starts = functional.TC_topk_router_metadata(indices, offsets, top_k)
        order = (scattered, inverse, starts, False)
        # Its weights are [2 F, H, E] and [H, F, E] with the memory of ours.
        hidden, projected = functional._UpProjection.apply(
            x, gate_up.permute(1, 2, 0), None, offsets, tokens * top_k, top_k, stream, gathered, *order, act, False
        )
        return functional._DownProjection.apply(
            hidden,
            projected,
            down.permute(1, 2, 0),
            None,
            weights,
            offsets,
            tokens,
            top_k,
            stream,
            gathered,
            *order,
            act,
        )

    # A row of the gate and one of up alternate.
    rows = torch.arange(2 * shape.width, device=backend.device).view(2, -1).t().flatten()
    return Variant(run, gate_up, down, rows)


def peer_variants(checkouts: Mapping[str, Path | None]) -> dict[str, Callable[[Shape], Variant]]:
    """Return a builder of each peer by name; a builder fails if the peer cannot be imported."""
    return {
        "hf": partial(hf, compiles=False),
        "hf compiled": partial(hf, compiles=True),
        "scattermoe": partial(scattermoe, checkout=checkouts["scattermoe"]),
        "sonicmoe": partial(sonicmoe, checkout=checkouts["sonicmoe"]),
    }


def _find(package: str, checkout: Path | None) -> None:
    """Make ``package`` importable from a checkout of its repository."""
    if checkout is None:
        raise ImportError(f"no checkout of {package}: pass --{package} DIR")
    if not (checkout / package / "__init__.py").is_file():
        raise ImportError(f"{checkout} has no package {package}")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
