"""Optimization of one model for a target: recipes, judge, measurement, search, choice and publication (`run.py`).

In: an `OptimizeRequest` and the opened model as ONNX. Out: an `Optimization`, and a folder with the fastest candidate
that is right, its manifest, `optimize.json` and `report.html`.
"""
