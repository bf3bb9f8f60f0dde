"""The XLA track: torch_xla on a CPU, run by .venv-xla."""
