"""ONNX to OpenVINO IR (.xml and .bin)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.child import run_in_child
from accel.errors import BuildFailed, ChildCrashed, InvalidModel, MissingExtra
from accel.signature import Dim, Signature, TensorSpec
from accel.sources.onnx_file import one_line
from accel.stage import StageConfig

_TYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "boolean": "bool"}


@dataclass(frozen=True, kw_only=True)
class OpenVinoFromOnnxConfig(StageConfig):
    """Nothing to choose."""


def openvino_from_onnx(src: Artifact, config: OpenVinoFromOnnxConfig, out: Path) -> Artifact:  # noqa: ARG001
    """Convert in a child process."""
    try:
        run_in_child("accel.converters.openvino_from_onnx:convert", path=src.path, out=out, signature=src.signature)
    except ChildCrashed as error:
        raise BuildFailed(f"OpenVINO can't convert {src.path}: {error}") from error
    return Artifact(
        path=out,
        kind="openvino",
        signature=src.signature,
        properties={"precision": src.properties.get("precision", "fp32")},
        companions=(out.with_suffix(".bin").name,),
    )


def convert(path: Path, out: Path, signature: Signature) -> None:
    import openvino as ov

    model = ov.Core().read_model(str(path))
    names = {
        "inputs": {s.name: [d if isinstance(d, str) else None for d in s.shape] for s in signature.inputs},
        "outputs": {s.name: [d if isinstance(d, str) else None for d in s.shape] for s in signature.outputs},
    }
    model.set_rt_info(json.dumps(names), ["accel", "dims"])
    ov.save_model(model, str(out), compress_to_fp16=False)


def describe(path: Path) -> tuple[Signature, dict[str, Any]]:
    """The signature that the IR itself declares."""
    try:
        import openvino as ov
    except ImportError as error:
        raise MissingExtra("openvino", "openvino") from error
    try:
        model = ov.Core().read_model(str(path))
    except Exception as error:
        raise InvalidModel(f"{path} is no OpenVINO IR: {one_line(error)}") from error
    names = json.loads(model.get_rt_info(["accel", "dims"]).value) if model.has_rt_info(["accel", "dims"]) else {}

    def spec(port: Any, role: str) -> TensorSpec:
        name = sorted(port.get_names())[0] if len(port.get_names()) == 1 else _pick(port, names.get(role, {}))
        kind = port.get_element_type().get_type_name()
        known = names.get(role, {}).get(name, [])
        shape: list[Dim] = []
        for axis, dim in enumerate(port.get_partial_shape()):
            if dim.is_static:
                shape.append(dim.get_length())
            else:
                shape.append((known[axis] if axis < len(known) else None) or f"{name}_{axis}")
        dtype = _TYPES.get(kind) or kind.replace("i", "int", 1).replace("uint", "uint").replace("u", "uint", 1)
        return TensorSpec(name, "int" + kind[1:] if kind[0] == "i" else dtype, tuple(shape))

    return Signature(
        tuple(spec(p, "inputs") for p in model.inputs), tuple(spec(p, "outputs") for p in model.outputs)
    ), {}


def _pick(port: Any, known: dict[str, Any]) -> str:
    return next((n for n in sorted(port.get_names()) if n in known), sorted(port.get_names())[0])
