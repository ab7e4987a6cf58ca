"""Transforms ONNX models without changing their precision, and reads and writes files for all converters.

A stage takes an ONNX artifact and returns an ONNX artifact. A writer writes a model from memory to a file. A reader
takes a file and returns its signature.
"""
