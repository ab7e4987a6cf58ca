"""Rewrites models that compute with complex numbers, so that they compute with real and imaginary parts.

Takes a PyTorch module and its example inputs. Returns a module that the exporters can write in ONNX.
"""
