"""Quantizes and calibrates ONNX models. `nncf`, `ort`, `fp8`, `blocks` and `weights` each implement one method.

Takes a float32 ONNX artifact and a `QuantizeConfig`. Returns an ONNX artifact in 8 or 4 bits, quantized for its target.
"""
