"""Profiles on simulated NeuronCores: the host's time by module, the graphs that ran, and no figure of memory."""

from __future__ import annotations

import json
from pathlib import Path

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.profiling import ProfileRequest, StepProfiler
from nxd_memopt.profiling.report import write_report
from tests.reference_models import batch, llama_config, parallel_model


def test_what_can_be_seen_of_recorded_graphs(tmp_path: Path) -> None:
    model = parallel_model(llama_config())
    move_model_to_device(model, backend.device)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    inputs = {name: tensor.to(backend.device) for name, tensor in batch().items()}
    profiler = StepProfiler(ProfileRequest(str(tmp_path), skip=2, steps=2), model, optimizer)
    while not profiler.is_done:
        with profiler.step():
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            backend.mark_step()
    profile = json.loads((tmp_path / "rank0.json").read_text())
    assert profile["memory"] is None and "nxd-memopt certify" in profile["memory_refusal"]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert profile["owned_bytes"]["weights"] == weights
    assert profile["owned_bytes"]["optimizer states"] >= 2 * weights
    assert profile["counters"]["run graphs"] >= 1 and profile["counters"]["compiled graphs"] == 0
    times = profile["time"]["modules"]["model.layers.1.mlp.down_proj"]
    assert times["forward"] > 0 and times["backward"] > 0
    lines = "\n".join(write_report(tmp_path))
    assert "run graphs" in lines and "which records operators into graphs" in lines
    assert not (tmp_path / "memory.png").exists()
