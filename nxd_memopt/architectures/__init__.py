"""What a Hugging Face configuration says of a model: layers, parameter shapes, experts, adapters; without torch."""
