"""Optimization of one model for a target: recipes, judge, measurement, search, choice and publication (`run.py`).

Takes an `OptimizeRequest` and the opened model as ONNX. Returns an `Optimization`. Writes a folder with the fastest
candidate that is right, its manifest, `optimize.json` and `report.html`.
"""
