"""The client of `accel infer`: requests over gRPC, and image files as a model's input.

Sends arrays or image files to a server's address. Returns an `Inference` with the output arrays.
"""
