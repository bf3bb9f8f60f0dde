"""Qwen2-MoE (arXiv:2407.10671) with Hugging Face's parameter names: Mixtral with biases and a gated shared expert."""

from __future__ import annotations

from nxd_memopt.models.mixtral import MixtralForCausalLM


class Qwen2MoeForCausalLM(MixtralForCausalLM):
    """Qwen2-MoE with a language-model head; same arguments and errors as ``MixtralForCausalLM``."""
