"""Models of the Hugging Face Hub, named by an id such as ``sentence-transformers/all-MiniLM-L6-v2``.

Takes an id. huggingface_hub downloads the files that accel reads into its own cache. Returns the folder or the ONNX
file in that cache, which ``accel.sources`` opens like any other folder or file.
"""
