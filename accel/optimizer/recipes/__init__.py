"""The recipes for candidates, a file per target, and `candidates.py`, which lists the recipes for a request.

In: an ONNX artifact and a `RecipeRequest`. Out: a `Recipe` (stages with limits, session options) for each candidate,
and a `NotTried` for each impossible precision.
"""
