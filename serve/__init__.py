"""Implements the inference server, and the client of `accel infer` (in `client`).

A folder may import only the folders to its right in this order: deploy > process > transports > core > models >
scheduling > generate | security | client > protocol.

Takes a repository of models in Triton's layout, and `ServeOptions`. Serves the models with the Open Inference Protocol,
over gRPC and HTTP.
"""
