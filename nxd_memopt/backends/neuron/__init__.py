"""The backends of Trainium: torch_xla on trn1, TorchNeuron on trn2 and trn3."""
