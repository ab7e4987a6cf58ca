"""Opens ONNX files. ``file`` reads and checks ONNX files, and ``weights`` leaves large weights on disk.

Takes an ONNX file of any exporter. Returns an artifact of kind ``onnx``, or the ``ModelProto``.
"""
