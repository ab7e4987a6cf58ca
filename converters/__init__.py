"""The stages that convert models, in one folder per job and one file per stage.

In: an artifact (a PyTorch or TensorFlow source, or an ONNX file) and the config of a stage. Out: the next artifact.
The folders to_* and from_* may import quantize and cast, and quantize and cast may import graph, but not the reverse.
"""
