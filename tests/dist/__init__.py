"""Tests that run on several real ranks, through tests.dist.pool."""
