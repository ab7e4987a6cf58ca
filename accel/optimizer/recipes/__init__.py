"""The recipes for candidates, a file per kind of target; `candidates.py` lists the recipes for a request.

In: an ONNX artifact and a `RecipeRequest`. Out: `Recipe`s (stages with limits, session options), and a `NotTried` for
each precision that can't be made.
"""
