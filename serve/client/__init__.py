"""The client of `accel infer`: requests over gRPC, and image files as a model's input.

In: a server's address, and arrays or image files. Out: an `Inference` with the output arrays.
"""
