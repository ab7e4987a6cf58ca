"""The user's models: ``Source`` (source.py), a folder for each of torch, tensorflow and onnx, and checkpoints.

In: a spec (a path, ``file.py:factory``, ``package.module:factory``, an artifact) with inputs, weights, dims and
TensorFlow options. Out: an ``Artifact`` with the model's inputs and outputs.
"""
