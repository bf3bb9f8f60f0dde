"""The peers of the benchmark of optimizer states on the host: each trains as transformers' model with torch's AdamW."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.bench.harness.configs import CONFIGS
from scripts.bench.races import offload_peers, state_offload
from scripts.bench.races.offload_peers import PEERS, with_fsdp2
from scripts.bench.races.peers import build_hf

MODEL = "llama-tiny"
TOKENS = 32


@pytest.fixture
def process_group():
    """No process group before, and none after what a peer creates."""
    assert not dist.is_initialized()
    yield
    dist.destroy_process_group()


def arguments(*options: str):
    return state_offload.argument_parser().parse_args(["--steps", "2", "--warm-up-steps", "2", *options])


def measured(monkeypatch, name: str, *options: str, **changes) -> dict[str, Any]:
    """Return the figures of the peer ``name`` after ``changes``, from the same weights for all."""
    monkeypatch.setitem(PEERS, name, dataclasses.replace(PEERS[name], **changes))
    # A large step, so that its effect on the loss is larger than rounding.
    monkeypatch.setattr(offload_peers, "LEARNING_RATE", 0.01)
    torch.manual_seed(5)
    return state_offload.measure_peer(name, CONFIGS[MODEL](), TOKENS, arguments(*options))


def test_fsdp2_with_fp32_states_trains_as_transformers_model(monkeypatch, process_group):
    """Loss and clipped norm; fails without clipping, too: the norm is above 1."""
    reference = measured(monkeypatch, "hf")
    peer = measured(monkeypatch, "fsdp2", build=with_fsdp2(build_hf, torch.float32, offload=True))
    assert reference["grad_norm"] > offload_peers.MAX_NORM
    for name in ("first_loss", "loss", "grad_norm"):
        assert peer[name] == pytest.approx(reference[name], rel=1e-4)  # sums in another order


def test_a_peer_without_its_packages_is_named_and_skipped(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(offload_peers, "installed", lambda name: [] if name == "deepspeed" else [name])
    monkeypatch.setattr(state_offload, "measured_row", lambda variant, *_: pytest.fail(f"{variant} ran"))
    csv = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["state_offload", "--variants", "deepspeed, flash4", "--append", "--csv", str(csv)])
    state_offload.main()
    assert capsys.readouterr().out == "deepspeed, flash4: skipped, not installed: deepspeed\n"
    assert not csv.exists()
