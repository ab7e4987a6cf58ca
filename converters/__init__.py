"""The stages that convert models: a folder per job, a file per stage, named after the edge that the stage makes.

In: an artifact (a PyTorch or TensorFlow source, or an ONNX file) and the config of a stage. Out: the next artifact.
Arrows between the folders: to_* and from_* may use quantize and cast, those may use graph; never the other way.
"""
