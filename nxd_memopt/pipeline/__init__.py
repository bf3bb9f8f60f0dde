"""Pipeline parallelism: runs the stages of a rank and exchanges activations and gradients with its neighbors."""
