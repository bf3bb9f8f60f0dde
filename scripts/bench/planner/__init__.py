"""Planned memory, time and choice of settings against measured steps."""
