"""The HTTP transport: REST v2 with binary tensors, health probes, `/metrics` and the live page.

In: bytes of HTTP requests, as JSON followed by binary tensors. Out: an `InferCall` for the server, and its replies as
JSON.
"""
