"""Qwen3 (arXiv:2505.09388) with Hugging Face's parameter names: LLaMA with norms of query and key."""

from __future__ import annotations

from nxd_memopt.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with a language-model head; arguments and errors as in ``LlamaForCausalLM``."""
