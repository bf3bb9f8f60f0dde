"""Training checkpoints: each rank writes its parts, and any layout of ranks reads them."""
