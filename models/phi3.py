"""Phi-3 (arXiv:2404.14219) and Phi-4: LLaMA with windows and partial RoPE, and fused projections in files."""

from __future__ import annotations

from nxd_memopt.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with a language-model head; arguments and errors as in ``LlamaForCausalLM``.

    Its projections are separate (``architectures.layers.FUSED_LAYERS``); checkpoints and adapters have the fused ones.
    """
