"""Activations on the host of a real device: the same bits, in less memory."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.optimizer import AdamW, OptimizerInBackward
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full", "recompute_keep_core_attn": True}])
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_bit_equal_in_less_memory(config, memory):
    settings = config(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_hidden_layers=6)
    model = parallel_model(settings).to(backend.device, torch.bfloat16)
    ids = torch.randint(VOCAB, (1, 8192), generator=torch.Generator().manual_seed(1)).to(backend.device)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def trained(offloaded: int):
        model.load_state_dict(start)
        apply_memory(model, MemoryConfig(cpu_offloading_num_layers=offloaded, **memory))
        optimizer = OptimizerInBackward(AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(4):
            backend.synchronize()
            backend.reset_peak_memory_stats()
            losses.append(model(ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
        optimizer.remove()
        return torch.stack(losses).detach(), backend.max_memory_allocated()

    losses, peak = trained(0)
    again, lower = trained(4)
    assert torch.equal(losses, again)
    assert memory or lower < 0.7 * peak
