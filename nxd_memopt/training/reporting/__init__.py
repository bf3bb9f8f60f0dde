"""What a run prints and records."""
