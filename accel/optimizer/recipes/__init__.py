"""Makes the recipes for candidates, with a file for each target. `candidates.py` lists the recipes for a request.

Takes an ONNX artifact and a `RecipeRequest`. Returns a `Recipe` with stages, limits and session options for each
candidate. Returns a `NotTried`, with the reason, for each precision that the model or the target doesn't support.
"""
