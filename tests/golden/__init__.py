"""Golden runs: 20 optimizer steps of two small models, whose losses every variant must reproduce."""
