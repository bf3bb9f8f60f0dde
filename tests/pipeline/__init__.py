"""Tests of pipeline parallelism."""
