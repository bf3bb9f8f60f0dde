"""Tests of what is written for AWS Neuron, on stand-ins: no Neuron package or device is needed."""
