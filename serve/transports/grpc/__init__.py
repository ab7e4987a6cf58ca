"""Serves the Open Inference Protocol over gRPC, with streams, grpc.health.v1 and reflection.

Converts each protobuf message to an `InferCall` for the server, and each reply of the server to a protobuf message.
"""
