"""Implements ZeRO, tensor, pipeline and context parallelism, compressed communication, and the mesh of ranks.

Takes a model and this rank's position in the mesh (`Ranks`). Returns this rank's part of the model, which communicates
with the parts of the other ranks.
"""
