"""Opens folders of pretrained models by their configs, with one module per library (transformers,
sentence-transformers, timm).

Takes a folder of the user or of the cache of huggingface_hub. Returns a ``Found``. No code of the folder is run.
"""
