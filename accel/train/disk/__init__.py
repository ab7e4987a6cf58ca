"""Keeps optimizer states on a disk between the steps of a run."""
