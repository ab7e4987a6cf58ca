"""Converts ONNX models to PyTorch, SavedModel, TFLite and ncnn. No target of the optimizer uses these formats.

Takes an ONNX artifact (for TFLite, a SavedModel). Returns an artifact of kind `torch`, `tensorflow`, `tflite` or
`ncnn`.
"""
