"""ONNX to OpenVINO IR, with rewrites of operations that OpenVINO computes wrongly or slowly.

In: an ONNX artifact. Out: an artifact of kind `openvino`: an `.xml` file with its `.bin` beside it.
"""
