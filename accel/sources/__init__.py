"""Models as users have them: ``Source`` (source.py), and a folder per framework: torch, tensorflow, onnx, checkpoints.

In: a spec (a path, ``file.py:factory``, ``package.module:factory``, an artifact) with inputs, weights, dims and the
options of TensorFlow. Out: an ``Artifact`` whose inputs and outputs are known from running the model.
"""
