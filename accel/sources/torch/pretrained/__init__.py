"""Opens folders of pretrained models according to their configs. Each library (transformers, sentence-transformers,
timm) has its own module.

The folder may be the user's own or part of the huggingface_hub cache. Each module returns a ``Found`` and never runs
code from the folder.
"""
