"""The Open Inference Protocol as Triton speaks it: requests, responses, errors, tensors, and the protobuf messages.

In: bytes and protobuf messages. Out: numpy arrays, `InferenceRequest`, `InferenceResponse`, `ServeError`.
"""
