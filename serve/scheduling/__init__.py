"""Scheduling of one model's requests: queue, dynamic batching, instances, sequences, response cache, rate limits.

`make_executor` takes a signature, the `Scheduling` options and a function that opens a session. It returns an
`Executor`.
"""
