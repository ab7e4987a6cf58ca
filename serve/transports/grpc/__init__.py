"""The gRPC transport: the service of the Open Inference Protocol, streams, grpc.health.v1 and reflection.

Turns a protobuf message into an `InferCall` for the server, and the server's replies into protobuf messages.
"""
