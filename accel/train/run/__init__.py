"""Runs the processes of a training run: the launcher, the ranks, and the watchdog that finds a hanging rank.

Takes a `TrainConfig` and a run folder. Returns the report of rank 0 (steps, loss, metrics), or raises one error for all
ranks.
"""
