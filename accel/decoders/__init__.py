"""Exports, proves and runs generative models with a KV cache. Takes opened sources and sessions. Gives folders that
onnxruntime-genai and optimum read, gate results, and tokens.
"""
