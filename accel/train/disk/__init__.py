"""Keeps optimizer states and parameters on a disk while a run does not use them."""
