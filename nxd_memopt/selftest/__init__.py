"""Checks of this library on the device at hand, which a bug report can carry: ``nxd-memopt selftest``."""
