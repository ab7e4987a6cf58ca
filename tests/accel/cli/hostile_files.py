"""Makes damaged, self-contradictory and malicious files from valid files.

Each ``make(good, here)`` writes into the folder ``here``. ``good`` is the folder of valid files that a fixture of
``test_hostile_files.py`` makes.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Make = Callable[[Path, Path], None]

# If the code in a hostile pickle runs, the code makes a folder named MARK.
MARK = "the-code-has-run"


def small(**changes: Any) -> onnx.ModelProto:
    """Makes the model ``y = x @ w``, where x is float32[batch, 4]. ``changes`` may replace ``opset``, ``ir``,
    ``nodes``, ``inputs``, ``outputs`` and ``weights``."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        changes.get("nodes", [helper.make_node("MatMul", ["x", "w"], ["y"])]),
        "small",
        changes.get("inputs", [value("x", TensorProto.FLOAT, ["batch", 4])]),
        changes.get("outputs", [value("y", TensorProto.FLOAT, ["batch", 4])]),
        changes.get("weights", [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")]),
    )
    opsets = changes.get("opsets", [helper.make_opsetid("", changes.get("opset", 17))])
    return helper.make_model(graph, opset_imports=opsets, ir_version=changes.get("ir", 8))


def chain(length: int) -> onnx.ModelProto:
    """Makes a model with a chain of ``length`` nodes. A long chain overflows the stack of a recursive parser."""
    nodes = [helper.make_node("Relu", [f"t{i}" if i else "x"], [f"t{i + 1}"]) for i in range(length)]
    nodes[-1].output[0] = "y"
    return small(nodes=nodes)


def deep_graph(depth: int) -> bytes:
    """Makes a graph with subgraphs nested ``depth`` levels deep. Writes the bytes directly, because protobuf itself
    refuses to serialize such a deep graph."""

    def field(number: int, payload: bytes) -> bytes:
        size, length = len(payload), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + payload

    body = b""
    for _ in range(depth):
        body = field(1, field(5, field(6, body)))  # the tags of GraphProto.node, NodeProto.attribute, AttributeProto.g
    return b"\x08\x08" + field(7, body)


def onnx_file(**changes: Any) -> Make:
    """Writes the model of ``small`` as ``m.onnx``."""
    return lambda _, here: onnx.save(small(**changes), here / "m.onnx") and None


def model_file(make: Callable[[], onnx.ModelProto]) -> Make:
    def write(_: Path, here: Path) -> None:
        (here / "m.onnx").write_bytes(make().SerializeToString())

    return write


def damaged_engine(good: Path, here: Path) -> None:
    """Writes ``model.engine`` with a wrong header and without a manifest."""
    (here / "model.engine").write_bytes(b"XXXX" + (good / "engine" / "model.engine").read_bytes()[4:])


def external(location: str = "w.data", size: int = 64, **entries: str) -> Make:
    """Writes a model with ``size`` bytes of external weights in ``w.data``. ``entries`` state where the weights are in
    the file, and may be wrong."""

    def write(_: Path, here: Path) -> None:
        model = small(weights=[])
        tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location.format(d=here), **entries}.items():
            tensor.external_data.add(key=key, value=value)
        (here / "m.onnx").write_bytes(model.SerializeToString())
        (here / "w.data").write_bytes(np.eye(4, dtype=np.float32).tobytes()[:size])

    return write


def external_link(_: Path, here: Path) -> None:
    """Writes a model with a weights file that links to a file outside the model's folder."""
    outside = here / "elsewhere"
    outside.mkdir()
    folder = here / "model"
    folder.mkdir()
    external()(here, folder)
    shutil.move(folder / "w.data", outside / "secret")
    (folder / "w.data").symlink_to(outside / "secret")


def recursive_function() -> onnx.ModelProto:
    """Makes a model with a local function that calls itself."""
    node = helper.make_node("Again", ["a"], ["b"], domain="own")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = small(nodes=[helper.make_node("Again", ["x"], ["y"], domain="own")], opsets=opsets)
    model.functions.append(helper.make_function("own", "Again", ["a"], ["b"], [node], opsets))
    return model


def wrong_dims(dims: list[int], data: bytes = b"") -> onnx.ModelProto:
    """Makes a model with a weight that has more or fewer values than its dims say."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=data)
    return small(weights=[weight])


def truncated(name: str, share: float = 0.5, *, to: str | None = None) -> Make:
    """Writes only the first part of a valid file. ``share`` is the fraction of bytes to write."""

    def write(good: Path, here: Path) -> None:
        data = (good / name).read_bytes()
        (here / (to or Path(name).name)).write_bytes(data[: int(len(data) * share)])

    return write


def flipped(name: str, seed: int, *, bits: int = 40) -> Make:
    """Writes a valid file with some flipped bits. Most of the flipped bits are in the first half of the file, which
    holds the headers."""

    def write(good: Path, here: Path) -> None:
        data = bytearray((good / name).read_bytes())
        rng = np.random.default_rng(seed)
        for place in (rng.beta(1, 3, bits) * len(data)).astype(int):
            data[place] ^= 1 << int(rng.integers(8))
        (here / Path(name).name).write_bytes(bytes(data))

    return write


def raw(name: str, data: bytes) -> Make:
    return lambda _, here: (here / name).write_bytes(data) and None


def also(*makes: Make) -> Make:
    def write(good: Path, here: Path) -> None:
        for make in makes:
            make(good, here)

    return write


def copied(*names: str) -> Make:
    """Copies valid files or folders."""

    def write(good: Path, here: Path) -> None:
        for name in names:
            if (good / name).is_dir():
                shutil.copytree(good / name, here / Path(name).name)
            else:
                shutil.copyfile(good / name, here / Path(name).name)

    return write


def zip_file(name: str, entries: dict[str, bytes]) -> Make:
    def write(_: Path, here: Path) -> None:
        with zipfile.ZipFile(here / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry, data in entries.items():
                archive.writestr(entry, data)

    return write


def zip_bomb(name: str, entry: str, megabytes: int = 128) -> Make:
    """Makes an archive of less than a megabyte with a single entry that unpacks to ``megabytes`` MB."""

    def write(_: Path, here: Path) -> None:
        block = bytes(1 << 20)
        with zipfile.ZipFile(here / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("archive/version", "3\n")
            with archive.open(entry, "w", force_zip64=True) as stream:
                for _ in range(megabytes):
                    stream.write(block)

    return write


class _Harm:
    """Makes a folder when an object of this class is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def harmful_pickle(here: Path) -> bytes:
    return pickle.dumps({"weight": _Harm(here / MARK)})


def pickled(name: str, *, inside: str = "") -> Make:
    """Makes a pickle that contains code, as a file or as the entry ``inside`` of an archive."""

    def write(_: Path, here: Path) -> None:
        if not inside:
            (here / name).write_bytes(harmful_pickle(here))
            return
        with zipfile.ZipFile(here / name, "w") as archive:
            folder = inside.partition("/")[0]
            archive.writestr(inside, harmful_pickle(here))
            archive.writestr(f"{folder}/version", "3\n")
            archive.writestr(f"{folder}/byteorder", "little")

    return write


def poisoned(name: str) -> Make:
    """Copies a torch archive. A pickle with code replaces every entry that torch may unpickle."""

    def write(good: Path, here: Path) -> None:
        harm = harmful_pickle(here)
        with zipfile.ZipFile(good / name) as source, zipfile.ZipFile(here / name, "w") as archive:
            for entry in source.namelist():
                bad = entry.endswith((".pkl", ".pt")) or "sample_inputs" in entry or "constants" in entry
                archive.writestr(entry, harm if bad else source.read(entry))

    return write


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> Make:
    """Writes ``w.safetensors`` with ``header``, which is either bytes or a value to write as JSON. If ``length`` is
    given, the file states this length for the header."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    said = len(body) if length is None else length
    return raw("w.safetensors", struct.pack("<Q", said) + body + data)


def npy(shape: str, dtype: str = "'<f4'", data: bytes = bytes(16)) -> bytes:
    """Returns the bytes of a .npy file with ``shape`` and ``dtype`` in its header."""
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(entries: dict[str, bytes]) -> Make:
    return zip_file("bad.npz", entries)


def arrays(**values: np.ndarray) -> Make:
    def write(_: Path, here: Path) -> None:
        stream = io.BytesIO()
        np.savez(stream, **values)  # type: ignore[arg-type]
        (here / "bad.npz").write_bytes(stream.getvalue())

    return write


def sidecar(change: Callable[[dict[str, Any]], None], *, name: str = "m.onnx") -> Make:
    """Copies a valid artifact, changes its manifest, and makes the manifest's digest match again."""

    def write(good: Path, here: Path) -> None:
        from accel.artifact import canonical_json, text_sha256

        files = [p for p in good.iterdir() if p.name.startswith(Path(name).stem + ".")]
        copied(*(p.name for p in files))(good, here)
        path = here / f"{name}.manifest.json"
        body = json.loads(path.read_text())
        del body["digest"]
        change(body)
        body["digest"] = text_sha256(canonical_json(body))
        path.write_text(json.dumps(body, indent=2) + "\n")

    return write
