"""Tests of mixture-of-experts layers against references written from the definitions."""
