"""Casts an ONNX model to float16 or bfloat16. Rules and a search for overflows choose the nodes that stay float32.

Takes a float32 ONNX artifact and a `CastConfig`. Returns an ONNX artifact that computes in 16 bits, except at the nodes
that need float32.
"""
