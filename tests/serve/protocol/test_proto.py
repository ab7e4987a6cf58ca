"""Proves that the ``.proto`` files describe the protocol of the server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from accel.serve.protocol import messages as proto
from accel.serve.protocol.text import proto_text

FOLDER = proto.DESCRIPTORS.parent
FILES = {f.name: f for f in descriptor_pb2.FileDescriptorSet.FromString(proto.DESCRIPTORS.read_bytes()).file}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_text_is_that_of_the_descriptors(name: str) -> None:
    """Fails if a ``.proto`` file and the server's descriptors differ by a byte, or if a file lacks its license."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == proto_text(FILES[name])
    assert "LICENSE.txt" in text.splitlines()[0]


def without_json_names(message: Any) -> Any:
    """Removes the fields' JSON names, because protoc writes JSON names into a descriptor set but not into generated
    code."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        without_json_names(nested)
    return message


def test_protoc_reads_them(tmp_path: Path) -> None:
    """Fails if the descriptors that protoc compiles from the files differ from the descriptors that the server
    loads."""
    found = tmp_path / "found.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={found}", *FILES]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    made = descriptor_pb2.FileDescriptorSet.FromString(found.read_bytes())
    assert {f.name for f in made.file} == set(FILES)
    for file in made.file:
        for message in file.message_type:
            without_json_names(message)
        assert file == FILES[file.name], file.name


def test_the_texts_are_whole() -> None:
    """Fails if the files lack a message or a method of the service."""
    text = (FOLDER / "grpc_service.proto").read_text(encoding="utf-8")
    assert set(re.findall(r"rpc (\w+)\(", text)) == set(proto.methods())
    assert "stream ModelInferRequest" in text
    assert "map<string, InferParameter> parameters" in text


def test_what_it_cannot_say_is_refused() -> None:
    """Checks that ``proto_text`` refuses descriptors with features that the ``.proto`` files don't support."""
    file = descriptor_pb2.FileDescriptorProto(name="x.proto", syntax="proto3", package="p")
    field = file.message_type.add(name="M").field.add(name="f", number=1, type="TYPE_INT32", label="LABEL_OPTIONAL")
    assert "int32 f = 1;" in proto_text(file)
    field.options.lazy = True
    with pytest.raises(ValueError, match="lazy"):
        proto_text(file)
    file.syntax = "proto2"
    with pytest.raises(ValueError, match="proto3"):
        proto_text(file)
