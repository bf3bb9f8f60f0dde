"""What all benchmarks share: rows with their circumstances, timing in turns, models and memory options."""
