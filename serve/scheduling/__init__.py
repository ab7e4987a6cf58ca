"""Scheduling of one model's requests: queue, dynamic batching, instances, sequences, response cache, rate limits.

In: a signature, the `Scheduling` options and a function that opens a session. Out: an `Executor` (`make_executor`).
"""
