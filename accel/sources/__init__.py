"""Opens the user's models. ``source.py`` defines ``Source``, and the subfolders have the code for torch, tensorflow,
onnx, checkpoints and the Hugging Face Hub.

Takes the spec of a model, and options such as inputs, weights and dims. The spec is a path, ``file.py:factory``,
``package.module:factory`` or an artifact. Returns an ``Artifact`` with the model's inputs and outputs.
"""
