"""The command ``nxd-memopt plan``."""
