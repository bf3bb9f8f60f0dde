"""The peers of the benchmark of optimizer states on the host: each trains as transformers' model with torch's AdamW."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_memopt._optional import installed
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.races import offload_peers, state_offload
from scripts.bench.races.offload_peers import PEERS, with_deepspeed_offload, with_fsdp2
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


def test_fsdp2_with_bf16_states_has_nothing_in_fp32(process_group):
    model, loss_of = with_fsdp2(build_hf, torch.bfloat16, offload=True)(
        CONFIGS[MODEL](), state_offload.MemoryConfig(recompute_granularity="full")
    )
    optimizer = offload_peers.ClippedAdamW(model)
    loss_of(torch.zeros(1, TOKENS, dtype=torch.int64)).backward()
    gradients = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    optimizer.step()
    states = optimizer._optimizer.state.values()
    moments = {moment.dtype for state in states for moment in (state["exp_avg"], state["exp_avg_sq"])}
    weights = {param.dtype for param in model.parameters()}
    assert gradients == moments == weights == {torch.bfloat16}
    # A cast of the buffers would change RoPE's angles.
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.skipif(not installed("deepspeed"), reason="DeepSpeed is not installed")
def test_deepspeed_trains_as_transformers_model(monkeypatch, process_group):
    reference = measured(monkeypatch, "hf")
    monkeypatch.setitem(offload_peers.os.environ, "DS_ACCELERATOR", "cpu")
    peer = measured(monkeypatch, "deepspeed", build=with_deepspeed_offload(build_hf))
    for name in ("first_loss", "loss", "grad_norm"):
        assert peer[name] == pytest.approx(reference[name], rel=1e-3)


def test_deepspeed_does_not_accumulate(monkeypatch):
    with pytest.raises(ValueError, match="--accumulation 2: DeepSpeed's engine has one"):
        measured(monkeypatch, "deepspeed", "--accumulation", "2")


def test_a_peer_without_its_packages_is_named_and_skipped(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(offload_peers, "installed", lambda name: [] if name == "deepspeed" else [name])
    monkeypatch.setattr(state_offload, "measured_row", lambda variant, *_: pytest.fail(f"{variant} ran"))
    csv = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["state_offload", "--variants", "deepspeed, flash4", "--append", "--csv", str(csv)])
    state_offload.main()
    assert capsys.readouterr().out == "deepspeed, flash4: skipped, not installed: deepspeed\n"
    assert not csv.exists()
