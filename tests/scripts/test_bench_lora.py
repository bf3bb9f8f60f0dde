"""The race of adapters: ours with both bases and PEFT train the same number of adapters on the same tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nxd_memopt.config import MemoryConfig
from nxd_memopt.parallel_layers import parallel_state
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.races import lora
from scripts.bench.races.peers import build_hf
from tests.dist.pool import distributed

BUILDERS = {
    "ours": lora.build_ours,
    "ours, fp8 base": partial(lora.build_ours, in_float8=True),
    # Liger-Kernel is for GPUs.
    "peft": partial(lora.build_peft, build_hf),
}


@distributed(world_size=[1])
def test_all_train_adapters_on_the_same_tokens():
    parallel_state.initialize_model_parallel(1)
    rows, sizes = [], set()
    args = SimpleNamespace(model="llama-tiny", lora_rank=4, sequences=2, steps=2, warm_up_steps=1)
    for variant, build in BUILDERS.items():
        model, _ = build(CONFIGS["llama-tiny"](), MemoryConfig(), 4)
        sizes.add(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(lora.BUILDERS, variant, build)
            rows.append(lora.measure(variant, MemoryConfig(), 32, args))
    assert len(sizes) == 1
    for row in rows:
        assert row["loss"] < row["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=0.05)  # other weights
    assert torch.isfinite(torch.tensor([row["loss"] for row in rows])).all()
