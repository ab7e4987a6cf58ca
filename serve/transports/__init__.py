"""The transports gRPC and HTTP, and their shared code for metrics and for the parameters of tensors.

A transport turns a client's bytes into calls of an `InferenceServer`. A transport also writes the answers in Triton's
wire formats. The HTTP transport also serves `/metrics`.
"""
