"""The gRPC transport: the service of the Open Inference Protocol, streams, grpc.health.v1 and reflection.

In: protobuf messages. Out: an `InferCall` for the server, and its replies as protobuf messages.
"""
