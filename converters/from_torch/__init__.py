"""PyTorch to ONNX: two exporters, tried in order until the file of one agrees with eager PyTorch.

In: an artifact of kind `torch` and an `OnnxFromTorchConfig`. Out: an ONNX artifact, or an error with a fix for the
model's code.
"""
