"""Implements `InferenceServer`, which every transport calls. Also implements the server's commands, shared memory,
settings and traces.

A transport passes an `InferCall` or a command, with the caller's token. The answer to a call is an `InferReply`, or a
`ServeError` with a status code.
"""
