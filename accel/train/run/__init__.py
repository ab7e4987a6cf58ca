"""The processes of a training run: the launcher, the program of one rank, the watchdog that finds a hanging rank.

In: a `TrainConfig` and a run folder. Out: the report of rank 0 (steps, loss, metrics), or one error for all ranks.
"""
