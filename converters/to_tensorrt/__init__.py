"""Checks and rewrites ONNX models for TensorRT, and builds TensorRT engines.

Takes an ONNX artifact and an `EngineFromOnnxConfig` (or a `FitTensorRtConfig`). Returns an engine, or an ONNX artifact
that TensorRT takes.
"""
