"""The cast of an ONNX model to float16 or bfloat16: rules that hold for any data, retyping, the search for overflows.

In: a float32 ONNX artifact and a `CastConfig`. Out: an ONNX artifact in 16 bits, with the nodes that need float32 kept.
"""
