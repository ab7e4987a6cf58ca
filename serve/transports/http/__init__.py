"""The HTTP transport: REST v2 with binary tensors, health probes, `/metrics` and the live page.

In: JSON with binary tensors behind it. Out: an `InferCall` for the server, and its replies as JSON.
"""
