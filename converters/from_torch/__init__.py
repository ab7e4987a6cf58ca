"""PyTorch to ONNX: two exporters, tried in order until an exporter's file agrees with eager PyTorch.

Takes an artifact of kind `torch` and an `OnnxFromTorchConfig`. Returns an ONNX artifact, or raises an error with a fix
for the model's code.
"""
