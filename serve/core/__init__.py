"""The inference server behind every transport: `InferenceServer`, its commands, shared memory, settings and traces.

In: an `InferCall` or a command, with the caller's token. Out: an `InferReply`, or a `ServeError` with a status code.
"""
