"""Serves gRPC without grpcio: an extension in C on libnghttp2 (``csrc``) reads and writes HTTP/2, and calls
``InferenceServer`` through Python.

In: an ``InferenceServer`` and a port. Out: a ``Transport`` (``transport.py``)."""
