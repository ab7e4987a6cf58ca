"""Converts models in stages, with one folder per job and one file per stage.

Each stage takes an artifact (a PyTorch or TensorFlow source, or an ONNX file) and a config, and returns the next
artifact. The folders to_* and from_* may import quantize and cast. The folders quantize and cast may import graph.
Imports in the opposite direction are forbidden.
"""
