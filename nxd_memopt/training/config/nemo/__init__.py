"""Translation of NeMo's YAML files."""
