"""The transports: gRPC, HTTP, and the shared code for metrics and parameters of tensors.

In: bytes from clients, and an `InferenceServer` to call. Out: the answers in Triton's wire formats, and `/metrics`.
"""
