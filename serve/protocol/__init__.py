"""The Open Inference Protocol as Triton speaks it: requests, responses, errors, tensors, and the protobuf messages.

Turns bytes into numpy arrays and back. Defines `InferenceRequest`, `InferenceResponse` and `ServeError`.
"""
