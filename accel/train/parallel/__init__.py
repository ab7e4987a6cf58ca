"""Parallel training: a module for each technique (ZeRO, tensor, pipeline, context), compressed communication, the mesh.

In: a model and this rank's position in the mesh (`Ranks`). Out: this rank's part of the model, with the communication
between ranks.
"""
