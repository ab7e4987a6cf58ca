"""Transposes a graph's weights from (K, N) to (N, K), the layout that the plugin library's matrix products read.

The folder of the transposed weights also contains links to the model's own weight files. The model's own file and
folder stay unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from accel.sources.onnx.file import all_nodes, external_files

_ONE_BYTE = (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)


def transpose_weights(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], source: Path, folder: Path) -> Path:
    """Replaces the second input of each node in ``nodes`` with the transposed weight.

    Puts all weight files into ``folder``. Returns a path in ``folder``, which tells TensorRT's parser the folder of the
    weight files.

    ``model`` was read from ``source``. The second input of each node has to be an initializer of rank 2 with a dtype of
    one or two bytes. An initializer is removed if no other node uses the initializer. The function loads only one
    weight into memory at a time.
    """
    wanted = dict.fromkeys(node.input[1] for node in nodes)
    if not wanted:
        return source
    own = external_files(model)
    for name in own:
        (folder / name).symlink_to((source.parent / name).absolute())
    location = _free("transposed", own)
    every = list(all_nodes(model.graph))
    inside = (inner for node in every for attribute in node.attribute for inner in (attribute.g, *attribute.graphs))
    users = Counter(value.name for graph in (model.graph, *inside) for value in (*graph.output, *graph.input))
    users.update(name for node in every for name in node.input)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {*users, *tensors, *(name for node in every for name in node.output)}
    users.subtract(node.input[1] for node in nodes)
    with (folder / location).open("wb") as file:
        for name in wanted:
            tensor = tensors[name]
            offset = file.tell()
            file.write(np.ascontiguousarray(_values(tensor, source.parent).T).data)
            said = {"location": location, "offset": str(offset), "length": str(file.tell() - offset)}
            turned = TensorProto(
                name=_free(f"{name}_transposed", names),
                data_type=tensor.data_type,
                dims=list(tensor.dims)[::-1],
                data_location=TensorProto.EXTERNAL,
                external_data=[onnx.StringStringEntryProto(key=key, value=value) for key, value in said.items()],
            )
            names.add(turned.name)
            wanted[name] = turned.name
            if users[name]:
                model.graph.initializer.append(turned)
            else:
                tensor.CopyFrom(turned)
    for node in nodes:
        node.input[1] = wanted[node.input[1]]
    return folder / source.name


def _values(tensor: TensorProto, folder: Path) -> np.ndarray[Any, Any]:
    """Returns the values of a matrix as unsigned integers of the same size, because numpy lacks some dtypes."""
    unit = np.dtype("<u1" if tensor.data_type in _ONE_BYTE else "<u2")
    if uses_external_data(tensor):
        held = TensorProto()
        held.CopyFrom(tensor)
        load_external_data_for_tensor(held, str(folder))
        tensor = held
    plain = np.frombuffer(tensor.raw_data, unit) if tensor.raw_data else np.array(tensor.int32_data).astype(unit)
    return plain.reshape(tensor.dims)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
