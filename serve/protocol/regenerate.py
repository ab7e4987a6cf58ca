"""Implements ``make descriptors``, which writes ``inference.binpb`` and the two ``.proto`` files from the descriptors
of an installed ``tritonclient[grpc]``."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2


def main() -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    from .text import proto_text

    folder = Path(__file__).parent
    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):  # service_pb2 imports model_config_pb2
        files.file.append(descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    (folder / "inference.binpb").write_bytes(files.SerializeToString(deterministic=True))
    for file in files.file:
        (folder / file.name).write_text(proto_text(file), encoding="utf-8")


if __name__ == "__main__":
    main()
