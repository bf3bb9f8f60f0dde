"""The blocks that models are made of: modules with parameters, built from the parallel layers."""
