"""The commands of ``nxd-memopt`` beside ``train``."""
