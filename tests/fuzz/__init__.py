"""The fuzzer: random models and runs on real ranks, compared with transformers in float64 or with each other."""
