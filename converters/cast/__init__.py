"""Casts an ONNX model to float16 or bfloat16, with rules for any data, retyping, and a search for overflows.

Takes a float32 ONNX artifact and a `CastConfig`. Returns an ONNX artifact that computes in 16 bits, except at the nodes
that need float32.
"""
