"""The stages that convert models, in one folder per job and one file per stage.

Takes an artifact (a PyTorch or TensorFlow source, or an ONNX file) and the config of a stage. Returns the next
artifact. The folders to_* and from_* may import quantize and cast. The folders quantize and cast may import graph.
Imports in the opposite direction are forbidden.
"""
