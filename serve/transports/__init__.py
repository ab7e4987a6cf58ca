"""Contains the gRPC and HTTP transports, and the code that they share for metrics and tensor parameters.

A transport turns a client's bytes into calls of an `InferenceServer`. A transport also writes the answers in Triton's
wire formats. The HTTP transport also serves `/metrics`.
"""
