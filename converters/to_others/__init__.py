"""Converts ONNX models to formats that the optimizer doesn't use: PyTorch, SavedModel, TFLite and ncnn.

Takes an ONNX artifact (for TFLite, a SavedModel). Returns an artifact of kind `torch`, `tensorflow`, `tflite` or
`ncnn`.
"""
