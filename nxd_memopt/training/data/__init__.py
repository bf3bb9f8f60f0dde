"""From documents to micro-batches."""
