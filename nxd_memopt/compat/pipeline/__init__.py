"""neuronx-distributed's pipeline stages: models that are traced and cut, or given as a list of layers."""
