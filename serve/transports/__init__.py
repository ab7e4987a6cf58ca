"""The transports: gRPC, HTTP, and the shared code for metrics and parameters of tensors.

A transport turns a client's bytes into calls of an `InferenceServer`. It writes the answers in Triton's wire formats.
The HTTP transport also serves `/metrics`.
"""
