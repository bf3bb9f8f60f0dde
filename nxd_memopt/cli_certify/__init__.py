"""Owns the command ``nxd-memopt certify``: arguments, the measuring process, the printed certificate."""
