"""ONNX files: ``file`` reads and checks ONNX files, ``weights`` leaves large weights on disk.

In: an ONNX file from anywhere. Out: an artifact of kind ``onnx``, or the ``ModelProto``.
"""
