"""Owns nothing itself: each modeling file stands alone."""
