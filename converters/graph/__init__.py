"""ONNX to ONNX without a change of precision, and the reading and writing that all converters share.

A stage takes an ONNX artifact and returns an ONNX artifact. A writer takes a model in memory. A reader takes a file and
returns its signature.
"""
