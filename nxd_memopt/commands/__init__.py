"""The commands of ``nxd-memopt`` other than ``train`` and ``launch``."""
