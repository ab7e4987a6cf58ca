"""Serves REST v2 with binary tensors, health probes, `/metrics` and the live page over HTTP.

A request is JSON, and binary tensors may follow the JSON. The transport turns the request into an `InferCall` for the
server. A reply has the same form as a request.
"""
