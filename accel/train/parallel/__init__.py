"""Parallel training: a file per technique (ZeRO, tensor, pipeline, context), compressed communication, the mesh.

In: a model and the place of this rank (`Ranks`). Out: this rank's part of the model, and how its parts communicate.
"""
