"""The trainer surface on one process."""
