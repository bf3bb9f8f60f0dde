"""ops and norms in one process: against PyTorch's and transformers' own, hand-computed cases, float64 gradcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from transformers.activations import ACT2FN
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rope
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

from nxd_memopt.modules.rms_norm import RMSNorm
from nxd_memopt.ops.activation import ACTIVATIONS, activation
from nxd_memopt.ops.attention import core_attention
from nxd_memopt.ops.math_attention import padding_and_causal_mask
from nxd_memopt.ops.norm import rms_norm
from nxd_memopt.ops.rope import RotaryEmbedding, apply_rope, rope_frequencies, rope_tables
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from tests.reference import (
    assert_float64_close,
    assert_says,
    error_message,
    gradients,
    tensors,
    unchanged,
)
from tests.reference_models import LLAMA3_ROPE, llama_config

# ---- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm_gradient_by_hand(eps):
    """With r = 1/sqrt(mean(x^2) + eps): dx = r (g w - x r^2 mean(g w x)), dw = sum(g x r)."""
    x, weight, upstream = tensors(7, 13).requires_grad_(), tensors(13, seed=1).requires_grad_(), tensors(7, 13, seed=2)
    with unchanged(x, weight, upstream):
        dx, dw = gradients(rms_norm(x, weight, eps), upstream, [x, weight])
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    gw = upstream * weight
    assert_float64_close(dx, r * (gw - x * r.square() * (gw * x).mean(-1, keepdim=True)), "dx")
    assert_float64_close(dw, (upstream * x * r).sum(0), "dw")
    assert gradcheck(lambda x, w: rms_norm(x, w, eps), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_rounds_as_llama(dtype):
    """Bit-equal to transformers, also for numbers whose squares overflow fp16; the result has the input's dtype."""
    x = 300 * tensors(7, 13, dtype=dtype)
    ours, theirs = RMSNorm(13, eps=1e-5, dtype=dtype), LlamaRMSNorm(13, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(tensors(13, seed=1))
        ours.weight.copy_(theirs.weight)
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == dtype


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_layer_norm_by_hand(eps):
    x = tensors(7, 13).requires_grad_()
    norm = LayerNorm(13, eps=eps, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(tensors(13, seed=1))
        norm.bias.copy_(tensors(13, seed=2))
    centred = x - x.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias
    assert_float64_close(norm(x), want)
    assert gradcheck(norm, (x,))


@pytest.mark.parametrize("enabled", [True, False])
def test_norms_tag_their_parameters(enabled):
    for norm in (LayerNorm(8, sequence_parallel_enabled=enabled), RMSNorm(8, sequence_parallel_enabled=enabled)):
        assert all(param.sequence_parallel_enabled == enabled for param in norm.parameters())
    assert len(list(LayerNorm(8, elementwise_affine=False).parameters())) == 0
    assert LayerNorm(8, bias=False).bias is None


# ---- attention -------------------------------------------------------------------------------------------------------


def test_mask_of_padding():
    """A padded key is not seen, but by itself."""
    mask = padding_and_causal_mask(torch.tensor([[0, 1, 1]]))
    assert mask.tolist() == [[[[True, False, False], [False, True, False], [False, True, True]]]]


@pytest.mark.parametrize("implementation", ["math", "sdpa"])
def test_attention_dropout_drops_weights_and_scales_the_rest(implementation):
    """With values of one, a row's output is the sum of its kept weights over 1 - p: 1 on average."""
    query, key = tensors(8, 4, 32, 8), tensors(8, 4, 32, 8, seed=1)
    out = core_attention(query, key, torch.ones_like(key), implementation=implementation, dropout_p=0.25)
    first = out[:, :, 0, 0]  # one weight of 1: kept or dropped
    assert set(first.unique().tolist()) <= {0.0, 1 / 0.75}
    # 1024 rows of variance below p/(1-p) = 1/3: standard error below 0.02, five of them are allowed
    assert out[..., 0].mean().item() == pytest.approx(1.0, abs=0.1)


# ---- rotary position embedding ---------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": 1.0,
    "long_factor": 2.0,
    "original_max_position_embeddings": 32,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": YARN,
    "yarn by ratio": YARN | {"factor": None, "truncate": False},
    "yarn with scales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 9.0, "beta_slow": 2.0},
    "yarn, scale given": YARN | {"attention_factor": 0.6},
    "longrope": LONGROPE,
    "longrope, scale given": LONGROPE | {"attention_factor": 1.4},
}
LENGTHS = (12, 64, 65, 4096)
"""Of tokens, for types that depend on it: ``llama_config`` has 64 positions."""


def rope_of(name: str, dim: int) -> dict[str, Any]:
    """The values of the type; LongRoPE has one factor for each frequency."""
    rope = dict(ROPES[name])
    for factors in ("short_factor", "long_factor"):
        if factors in rope:
            rope[factors] = [rope[factors] + 0.1 * i for i in range(dim // 2)]
    return rope


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dim", [4, 128])
def test_frequencies_equal_transformers(dim, name):
    """Bit for bit: at position 100000 the last bit of a frequency is 6e-3 radians."""
    config = llama_config(rope_parameters=rope_of(name, dim), head_dim=dim)
    theirs = LlamaRotaryEmbedding(config)
    for length in LENGTHS:
        ours = RotaryEmbedding(dim, config.rope_parameters, config.max_position_embeddings)
        positions = torch.arange(length)[None]
        cos, sin = theirs(torch.zeros(()), positions)
        got = ours.frequencies(length, torch.device("cpu"))
        assert got.dtype == torch.float32 and torch.equal(got, theirs.inv_freq)
        assert ours.scale == theirs.attention_scaling
        assert all(map(torch.equal, ours.tables(positions, length, torch.float32), (cos, sin)))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_of_rows_with_several_lengths_are_refused(name):
    rope = RotaryEmbedding(8, rope_of(name, 8), 64)
    longest = {"dynamic": 64, "longrope": 32}[name]
    rope.require_one_length(longest, packed=True)
    rope.require_one_length(longest + 1, packed=False)
    message = error_message(lambda: rope.require_one_length(longest + 1, packed=True))
    assert_says(message, name, f"above {longest} tokens", f"rows of {longest + 1}", "data.isolate_documents false")
    message = error_message(lambda: rope.require_one_length(5, packed=False, positions_given=True))
    assert_says(message, name, "leave position_ids out")


@pytest.mark.parametrize("rotary_dim", [2, 4, 8])
def test_rotation_equals_transformers(rotary_dim):
    """LLaMA rotates all of a head, GPT-NeoX a part."""
    query, key = (tensors(2, 3, 7, 8, seed=seed, dtype=torch.float32) for seed in (0, 1))
    positions = torch.stack([torch.arange(7), torch.arange(7) + 3])
    cos, sin = rope_tables(rope_frequencies(rotary_dim, ROPES["default"]), positions, torch.float32)
    reference = llama_rope if rotary_dim == 8 else neox_rope
    for got, want in zip((apply_rope(t, cos, sin) for t in (query, key)), reference(query, key, cos, sin), strict=True):
        assert torch.equal(got, want)


def test_rotation_gradcheck():
    cos, sin = rope_tables(rope_frequencies(4, ROPES["default"]), torch.arange(3).unsqueeze(0), torch.float64)
    assert gradcheck(lambda x: apply_rope(x, cos, sin), (tensors(1, 2, 3, 5).requires_grad_(),))


def test_unknown_rope_is_refused():
    message = error_message(lambda: RotaryEmbedding(8, {"rope_type": "llama2", "rope_theta": 1e4}, 64))
    assert_says(message, "rope_type", "llama2", "did you mean 'llama3'")


# ---- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_transformers(name):
    x = tensors(97).requires_grad_()
    assert_float64_close(activation(name)(x), ACT2FN[name](x))
    assert gradcheck(activation(name), (x,))
