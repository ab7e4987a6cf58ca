"""Opens ONNX files. ``file`` reads and checks ONNX files, and ``weights`` leaves large weights on disk.

Takes an ONNX file of any exporter. ``open_onnx`` returns an artifact of kind ``onnx``, and ``read_proto`` returns the
``ModelProto``.
"""
