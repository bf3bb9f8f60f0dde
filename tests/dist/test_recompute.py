"""Recomputation changes memory alone: loss and gradients are bit-equal, dropout included, at every T."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.parallel_layers import grads, parallel_state, random
from tests.dist.pool import distributed
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

MODELS = {
    "llama": lambda: llama_config(num_hidden_layers=3, attention_dropout=0.2),
    "neox": lambda: gpt_neox_config(num_hidden_layers=3, attention_dropout=0.2, hidden_dropout=0.1),
    "neox, attention without dropout": lambda: gpt_neox_config(num_hidden_layers=3, hidden_dropout=0.1),
}
ALL_MODULES = ("core_attn", "norm", "mlp_act")
VARIANTS = {
    "nothing": {},
    **{
        f"selective {name}": {"recompute_granularity": "selective", "recompute_modules": (name,)}
        for name in ("core_attn", "attn", "norm", "mlp_act", "mlp")
    },
    "selective, several": {"recompute_granularity": "selective", "recompute_modules": ALL_MODULES},
    "selective, one in another": {"recompute_granularity": "selective", "recompute_modules": ("attn", "core_attn")},
    "selective block 2": {
        "recompute_granularity": "selective",
        "recompute_modules": ("attn", "norm"),
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "full": {"recompute_granularity": "full"},
    "full uniform 3": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    "full nested 2": {"recompute_granularity": "full", "recompute_method": "nested", "recompute_num_layers": 2},
    "full block 2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}


def step(name: str, *, sequence_parallel: bool, attention_backend="math", **options) -> dict[str, torch.Tensor]:
    """Two forward and backward passes, as in gradient accumulation."""
    torch.manual_seed(1)
    options = {"sequence_parallel": sequence_parallel, "attention_backend": attention_backend, **options}
    model = parallel_model(MODELS[name](), **options)
    random.model_parallel_manual_seed(7)
    results = {}
    for i in range(2):
        loss = model.train()(**batch()).loss
        loss.backward()
        results[f"loss {i}"] = loss.detach()
    grads.allreduce_sequence_parallel_gradients(model)
    results |= {n: p.grad for n, p in model.named_parameters()}
    streams = random.get_rng_tracker().get_states()
    return results | {"default stream": torch.get_rng_state()} | streams


@distributed(world_size=1, slow=[2, 4])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_bit_equal(name, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    for sequence_parallel in [False, True][: min(world_size, 2)]:
        want = step(name, sequence_parallel=sequence_parallel)
        assert want["loss 0"] != want["loss 1"], "dropout was on"
        for variant, options in VARIANTS.items():
            got = step(name, sequence_parallel=sequence_parallel, **options)
            assert list(got) == list(want), variant
            for key, value in want.items():
                assert torch.equal(got[key], value), f"{variant}: {key}, sequence parallel {sequence_parallel}"


@distributed(world_size=[1, 2])
def test_kept_attention_is_bit_equal(world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    name, shared = "neox, attention without dropout", {"sequence_parallel": world_size > 1, "attention_backend": "sdpa"}
    want = step(name, **shared)
    got = step(name, **shared, recompute_granularity="full", recompute_keep_core_attn=True)
    for key, value in want.items():
        assert torch.equal(got[key], value), key
