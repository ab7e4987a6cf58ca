"""Fuses the graphs of decoders into ONNX Runtime's operators for generation. Takes a float32 ONNX artifact with a KV
cache. Gives an ONNX artifact with the same inputs and outputs, whose cache can grow in place.
"""
