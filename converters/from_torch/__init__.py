"""Exports PyTorch models to ONNX with two exporters, tried in order until a file agrees with eager PyTorch.

Takes an artifact of kind `torch` and an `OnnxFromTorchConfig`. Returns an ONNX artifact, or raises an error with a fix
for the model's code.
"""
