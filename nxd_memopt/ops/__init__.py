"""Maths on local tensors, without communication; the plain PyTorch form is the specification."""
