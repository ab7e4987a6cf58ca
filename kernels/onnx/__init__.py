"""The kernels as ONNX operators: function bodies for any runtime, export from PyTorch, fusion of graphs.

Takes an ONNX model or an exported program. Puts in accel's operators, such as `accel::FusedGemm`, and gives each
operator a function body.
"""
