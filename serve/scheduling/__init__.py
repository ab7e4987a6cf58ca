"""Schedules the requests of one model, with a queue, dynamic batching, instances, sequences, a response cache and rate
limits.

`make_executor` creates an `Executor` from a signature, the `Scheduling` options and a function that opens a session.
"""
