"""The search for the techniques and sizes with which a step fits."""
