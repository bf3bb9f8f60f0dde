"""Front-ends and tools of a checkout; run modules from its root, such as ``python -m scripts.bench.train_step``."""
