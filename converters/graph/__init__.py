"""ONNX to ONNX without a change of precision, and the reading and writing that all converters share.

In: an ONNX artifact, or a model in memory to be written. Out: an ONNX artifact, or from a reader the signature of a
file.
"""
