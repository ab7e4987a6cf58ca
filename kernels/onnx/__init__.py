"""The kernels as ONNX operators: function bodies for any runtime, export from PyTorch, fusion of graphs.

In: an ONNX model or an exported program. Out: the model with accel's operators (`accel::FusedGemm`...), each with a
function body.
"""
