"""Quantization of ONNX models: a file per method (`nncf`, `ort`, `fp8`, `blocks`, `weights`), calibration, sensitivity.

Takes a float32 ONNX artifact and a `QuantizeConfig`. Returns an ONNX artifact in 8 or 4 bits, quantized for its target.
"""
