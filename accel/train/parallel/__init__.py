"""Parallel training: a module for each technique (ZeRO, tensor, pipeline, context), compressed communication, the mesh.

Takes a model and this rank's position in the mesh (`Ranks`). Returns this rank's part of the model, which communicates
with the parts of the other ranks.
"""
