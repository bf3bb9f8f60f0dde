"""Mistral (arXiv:2310.06825) with Hugging Face's parameter names: LLaMA with an attention window."""

from __future__ import annotations

from nxd_memopt.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral with a language-model head; arguments and errors as in ``LlamaForCausalLM``."""
