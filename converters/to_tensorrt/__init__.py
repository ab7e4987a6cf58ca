"""ONNX to TensorRT engines: preflight, rewrites, optimization profiles, the build, plugins, the kernel table.

In: an ONNX artifact and an `EngineFromOnnxConfig` (or a `FitTensorRtConfig`). Out: an engine, or an ONNX artifact that
TensorRT takes.
"""
