"""ONNX files: ``file`` reads and checks them, ``weights`` leaves large weights in their files.

In: an ONNX file from anywhere. Out: an artifact of kind ``onnx``, or the ``ModelProto``.
"""
