"""Front-ends and tools; run modules from the root of a checkout: ``python -m scripts.bench.races.train_step``."""
