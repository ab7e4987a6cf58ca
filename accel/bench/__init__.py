"""Timing: paired blocks in separate processes, and their statistics."""
