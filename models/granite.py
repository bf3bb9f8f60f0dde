"""Granite 3 (ibm-granite) with Hugging Face's parameter names: LLaMA with four constant factors."""

from __future__ import annotations

from nxd_memopt.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite with a language-model head; arguments and errors as in ``LlamaForCausalLM``."""
