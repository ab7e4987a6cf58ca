"""Optimizes a model for a target: makes candidates from recipes, judges and measures them, and publishes the best
(`run.py`).

Takes an `OptimizeRequest` and the opened model as ONNX. Returns an `Optimization`. Writes a folder with the fastest
candidate that passed, its manifest, `optimize.json` and `report.html`.
"""
