"""Reads the kernels of an engine, and the ONNX nodes fused into each kernel, from TensorRT's log.

TensorRT logs the kernels at the end of a build with detailed verbosity.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_ROW = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), (?P<rest>.*)$")
_DTYPE = re.compile(r"Datatype: (\w+)")
_SOURCE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\[\x1f]|$)")  # the names are adjacent, or separated by \x1f
_FIELD_NAMES = {"float": "float32", "half": "float16"}
_END = ("I/O Tensors:", "Engine Metadata:", "Bindings:")


def parse_layers(listing: str) -> list[dict[str, Any]]:
    """Returns a dict for each kernel, with ``name``, ``type``, ``inputs`` and ``outputs`` (distinct dtypes), and
    ``onnx`` (the names of the ONNX nodes). Skips lines that don't describe a kernel."""
    rows = []
    for line in listing.splitlines():
        if line.strip() in _END:
            break
        match = _ROW.match(line.strip())
        if match is None:
            continue
        sides = _split_sides(match["rest"])
        rows.append(
            {
                "name": match["name"],
                "type": match["type"],
                "inputs": _dtypes(sides[0]),
                "outputs": _dtypes(sides[1]),
                "onnx": _SOURCE.findall(match["rest"].partition("Metadata: ")[2].strip()),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts all kernels, the kernels of each type, the kernels of each output dtype, and the kernels that compute
    several ONNX nodes (``fused``)."""
    return {
        "kernels": len(rows),
        "fused": sum(len(row["onnx"]) > 1 for row in rows),
        "types": dict(sorted(Counter(row["type"] for row in rows).items())),
        "dtypes": dict(sorted(Counter("+".join(row["outputs"]) or "none" for row in rows).items())),
    }


def fusions(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups the kernels by their ONNX nodes.

    ``fused`` has the kernels that compute several nodes, with the most nodes first. ``alone`` has the kernels that
    compute one node. ``split`` has each node with several kernels, and the names of these kernels. ``added`` has the
    kernels without a node, such as reformats and copies.
    """
    homes: dict[str, list[str]] = {}
    for row in rows:
        for name in row["onnx"]:
            homes.setdefault(name, []).append(row["name"])
    several = {name: kernels for name, kernels in homes.items() if len(kernels) > 1}
    fused = [row for row in rows if len(row["onnx"]) > 1]
    return {
        "fused": sorted(fused, key=lambda row: -len(row["onnx"])),
        "alone": [row for row in rows if len(row["onnx"]) == 1],
        "split": [{"node": name, "kernels": kernels} for name, kernels in several.items()],
        "added": [row for row in rows if not row["onnx"]],
    }


def _split_sides(rest: str) -> tuple[str, str]:
    """Returns the texts of the fields Inputs and Outputs. Each text is read up to the name of the next field, because
    the first closing bracket may be an inner bracket."""
    inputs = rest.partition("Inputs: ")[2].partition("], Constants: ")[0].partition("], Outputs: ")[0]
    outputs = rest.partition("Outputs: ")[2].partition("], TacticName: ")[0]
    return inputs, outputs


def _dtypes(side: str) -> list[str]:
    return sorted({_FIELD_NAMES.get(name.lower(), name.lower()) for name in _DTYPE.findall(side)})
