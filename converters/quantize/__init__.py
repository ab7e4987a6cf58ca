"""Quantizes and calibrates ONNX models. `dynamic`, `nncf`, `ort`, `fp8`, `blocks`, `gptq` and `weights` are methods.

Takes a float32 ONNX artifact and a `QuantizeConfig`. Returns an ONNX artifact in 8 or 4 bits, quantized for its target.
"""
