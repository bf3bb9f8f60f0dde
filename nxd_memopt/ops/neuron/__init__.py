"""Owns what is written for AWS Neuron's kernels; importing it needs none of Neuron's packages."""
