"""The options of a run: sections, parsing, NeMo's names."""
