"""Finds models of the Hugging Face Hub by an id such as ``sentence-transformers/all-MiniLM-L6-v2``.

Takes the id of a model. The library huggingface_hub downloads the needed files to its own cache. Returns the path of
the cached folder or ONNX file, which ``accel.sources`` opens like any other folder or file.
"""
