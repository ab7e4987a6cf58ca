"""ONNX to TensorRT engines: preflight, rewrites, optimization profiles, the build, plugins, the kernel table.

Takes an ONNX artifact and an `EngineFromOnnxConfig` (or a `FitTensorRtConfig`). Returns an engine, or an ONNX artifact
that TensorRT takes.
"""
