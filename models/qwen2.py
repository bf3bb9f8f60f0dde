"""Qwen2 and Qwen2.5 (arXiv:2412.15115) with Hugging Face's parameter names: LLaMA with biases on query, key, value."""

from __future__ import annotations

from nxd_memopt.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with a language-model head; arguments and errors as in ``LlamaForCausalLM``."""
