"""Tests of ``nxd-memopt selftest``: planted faults, ranks that end, and the page of results."""
