"""Opens the user's models. ``source.py`` has ``Source``, and the folders have the code for torch,
tensorflow, onnx and checkpoints.

Takes a spec (a path, ``file.py:factory``, ``package.module:factory``, an artifact) with inputs, weights, dims and
TensorFlow options. Returns an ``Artifact`` with the model's inputs and outputs.
"""
