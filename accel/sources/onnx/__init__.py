"""ONNX files. ``file`` reads and checks them, and ``weights`` leaves large weights on disk.

Takes an ONNX file from anywhere. Returns an artifact of kind ``onnx``, or the ``ModelProto``.
"""
