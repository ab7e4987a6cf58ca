"""Implements Triton's version of the Open Inference Protocol: requests, responses, errors, tensors and protobuf
messages.

Converts bytes to numpy arrays and back. Defines `InferenceRequest`, `InferenceResponse` and `ServeError`.
"""
