"""Converts TensorFlow and TFLite models to ONNX, with tf2onnx in the TensorFlow process.

Takes an artifact of kind `tensorflow` or `tflite` and a `Tf2OnnxConfig`. Returns an ONNX artifact with the names and
the layout of the source.
"""
