"""Qwen3-MoE (arXiv:2505.09388) with Hugging Face's parameter names: Mixtral with norms of query and key."""

from __future__ import annotations

from nxd_memopt.models.mixtral import MixtralForCausalLM


class Qwen3MoeForCausalLM(MixtralForCausalLM):
    """Qwen3-MoE with a language-model head; same arguments and errors as ``MixtralForCausalLM``."""
