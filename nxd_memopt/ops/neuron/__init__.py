"""Operators for AWS Neuron; importing this package needs none of Neuron's packages."""
