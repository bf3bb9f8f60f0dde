"""The backends of Trainium: torch_xla on trn1, TorchNeuron on trn2 and trn3."""

LOSS_SCALING_REFUSAL = (
    "is not supported on Trainium: the host would read in every step whether to skip it, and bf16, which "
    "is as fast there, needs no loss scale"
)
"""Why both backends refuse fp16 training."""
MOST_OF_TOP_K = 16384
"""The largest k of ``torch.topk`` that neuronx-cc compiles (its error NCC_EVRF014)."""
