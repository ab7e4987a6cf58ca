"""Converts ONNX models to OpenVINO IR, and rewrites operations that OpenVINO computes wrongly or slowly.

Takes an ONNX artifact. Returns an artifact of kind `openvino`, which is an `.xml` file with its `.bin` beside it.
"""
