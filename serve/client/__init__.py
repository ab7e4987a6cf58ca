"""Implements the client of `accel infer`, with requests over gRPC and image files as a model's input.

Sends arrays or image files to a server's address. Returns an `Inference` with the output arrays.
"""
