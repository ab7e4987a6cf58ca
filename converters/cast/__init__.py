"""The cast of an ONNX model to float16 or bfloat16: rules for any data, retyping, and the search for overflows.

Takes a float32 ONNX artifact and a `CastConfig`. Returns an ONNX artifact that computes in 16 bits, except at the nodes
that need float32.
"""
