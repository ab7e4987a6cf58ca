"""Comparing outputs: metrics, tolerances, gates."""
