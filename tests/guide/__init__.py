"""The code blocks of AWS's developer guide for activation memory reduction, run on two ranks."""
