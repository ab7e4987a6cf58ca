"""The cast of an ONNX model to float16 or bfloat16: rules for any data, retyping, and the search for overflows.

Takes a float32 ONNX artifact and a `CastConfig`. Returns an ONNX artifact in 16 bits, except for the nodes that need
float32.
"""
