"""Opens the user's models. ``source.py`` defines ``Source``, and the subfolders have the code for torch, tensorflow,
onnx, checkpoints and the Hugging Face Hub.

Takes a model's spec (a path, ``file.py:factory``, ``package.module:factory`` or an artifact) with inputs, weights, dims
and TensorFlow options. Returns an ``Artifact`` with the model's inputs and outputs.
"""
