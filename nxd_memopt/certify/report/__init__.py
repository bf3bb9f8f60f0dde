"""Compares measurements with expectations and prints the certificate."""
