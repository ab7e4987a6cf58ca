"""The recipes for candidates, in a file per target. `candidates.py` lists the recipes for a request.

Takes an ONNX artifact and a `RecipeRequest`. Returns a `Recipe` for each candidate, with stages, limits and session
options, and a `NotTried` for each impossible precision.
"""
