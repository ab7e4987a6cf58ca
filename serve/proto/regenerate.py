"""Writes ``inference.binpb`` from the descriptors of an installed ``tritonclient[grpc]`` (make descriptors)."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2


def main() -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):  # imported before importing
        files.file.append(descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    (Path(__file__).parent / "inference.binpb").write_bytes(files.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
