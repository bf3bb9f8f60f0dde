"""The race of experts: variants have equal weights, and one that computes something else is not timed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from scripts.bench.races import moe_layer
from scripts.bench.races.moe_peers import Shape, peer_variants

SHAPE = Shape(16, 24, 4, 2)
NO_CHECKOUT = {"scattermoe": None, "sonicmoe": None}


@pytest.fixture
def raced(monkeypatch):
    """Without a clock; the names of the variants that are timed."""
    timed: list[str] = []

    def race(calls, turns, *, busy_s):
        assert busy_s == moe_layer.BUSY_S
        timed.extend(calls)
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(moe_layer, "race", race)
    monkeypatch.setattr(moe_layer, "peak_gib", lambda call: call() or 0.0)
    monkeypatch.setitem(moe_layer.SHAPES, "tiny", SHAPE)
    return timed


def measured(*variants, **options):
    args = Namespace(tokens=24, turns=1, variants=variants, **(NO_CHECKOUT | options))
    return moe_layer.measure("tiny", "random", args)


def test_variants_agree_and_a_missing_checkout_is_named(raced):
    ours, hf, peer = measured("ours", "hf", "scattermoe")
    assert ours["difference"] == 0
    assert 0 < hf["difference"] < moe_layer.TOLERANCE
    assert "--scattermoe DIR" in peer["failure"]
    assert raced == ["floor", "batched floor", "ours", "hf"]


@pytest.mark.parametrize("fault", ["rows of up first", "weights dropped", "gradient not finite"])
def test_another_function_is_not_timed(raced, monkeypatch, fault):
    def build(shape):
        right = peer_variants(NO_CHECKOUT)["hf"](shape)
        if fault == "rows of up first":
            return replace(right, rows=torch.arange(2 * shape.width).roll(shape.width))
        if fault == "weights dropped":
            return replace(right, run=lambda x, weights, chosen: right.run(x, 0 * weights + 0.5, chosen))
        return replace(right, run=lambda x, weights, chosen: right.run(x, weights, chosen) + 0 * (x - x).sqrt())

    monkeypatch.setattr(moe_layer, "peer_variants", lambda checkouts: {"hf": build})
    ours, wrong = measured("ours", "hf")
    assert "differs from ours" in wrong["failure"]
    assert "ms" in ours and "ms" not in wrong
