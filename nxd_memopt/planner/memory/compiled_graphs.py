"""What a NeuronCore holds besides the tensors of a step, where each step runs as compiled graphs (torch_xla)."""

from __future__ import annotations

DMA_SPILL_SHARE = 0.115
"""DMA descriptors in device memory, per byte of a compiled graph's temporaries: 1.02 of 8.88 GiB in the one account of
neuronx-cc that is published for a training step on trn1 (LLaMA-3.1-8B with LoRA, T=2, S=8192, recompute, neuronx-cc
2.26: NCC_EOOM002, 18.12 GiB of 16). With it, and temporaries in proportion to S, the sum for S=4096 is 14.2 GiB, where
neuron-monitor measured 14.14. Source: github.com/alpharomercoma/torchneuronx, trn1/results/extras."""

UPDATED = "updated parameters"
SPILLS = "DMA ring spills"


def graph_terms(temporary_bytes: int, weights: int, *, master_weights: bool) -> dict[str, int]:
    """Return the bytes of each purpose next to states, gradients and temporaries.

    Args:
        temporary_bytes: activations and temporary tensors of the largest graph of the step, its scratchpad.
        weights: bytes of the trained parameters.
        master_weights: the update computes the parameters from fp32 masters.
    """
    # The old values of parameters with masters are no input of the update's graph, so the new ones cannot take their
    # memory; the scratchpad of forward and backward stays allocated meanwhile.
    updated = 0
    if master_weights:
        updated = weights
    return {UPDATED: updated, SPILLS: int(DMA_SPILL_SHARE * temporary_bytes)}
