"""The HTTP transport: REST v2 with binary tensors, health probes, `/metrics` and the live page.

A request is JSON, which binary tensors may follow. The transport turns the request into an `InferCall` for the server,
and the server's reply into the same form.
"""
