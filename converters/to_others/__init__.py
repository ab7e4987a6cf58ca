"""ONNX to formats beyond the optimizer's targets: PyTorch, SavedModel, TFLite, ncnn.

In: an ONNX artifact (for TFLite, a SavedModel). Out: an artifact of kind `torch`, `tensorflow`, `tflite` or `ncnn`.
"""
