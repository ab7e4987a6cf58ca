"""ONNX to the formats that no target of the optimizer uses, namely PyTorch, SavedModel, TFLite and ncnn.

In: an ONNX artifact (for TFLite, a SavedModel). Out: an artifact of kind `torch`, `tensorflow`, `tflite` or `ncnn`.
"""
