"""ONNX back to TensorFlow: a SavedModel by onnx2tf."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.converters.keras2_process import NotTensorFlow, run_with_keras2
from accel.errors import UnsupportedHere, one_line
from accel.progress import report
from accel.signature import Signature
from accel.sources.tensorflow_process import require_tensorflow
from accel.stage import StageConfig

# The pins of onnx2tf 1.29 (numpy 1.26, TensorFlow 2.19, protobuf 4...) exclude every other part of accel, and it runs
# with newer ones all the same: so it can't be an extra, and is installed without its dependencies.
ONNX2TF = (
    "pip install --no-deps onnx2tf==1.29.24 ai-edge-litert==2.3.0 backports.strenum==1.2.8 tf-keras==2.21.0 "
    "onnx-graphsurgeon==0.6.1 sng4onnx==2.0.1 psutil==7.2.2"
)
# How the inputs keep the layout they have in ONNX: channels first outside and last inside, which convolutions in
# TensorFlow need; or nothing is turned at all, which suits what came from TensorFlow and has its own transposes.
_RUNGS = {
    "channels last inside": "keep_ncw_or_nchw_or_ncdhw_input_names",
    "as it is": "keep_shape_absolutely_input_names",
}
# A rung whose numbers are further off than this has turned something wrongly.
_RIGHT = 1e-2


@dataclass(frozen=True, kw_only=True)
class SavedModelFromOnnxConfig(StageConfig):
    """``timeout``: seconds until onnx2tf is given up."""

    timeout: float = 1800.0


def saved_model_from_onnx(src: Artifact, config: SavedModelFromOnnxConfig, out: Path) -> Artifact:
    """Write ``src`` as a SavedModel into the folder of ``out``: one signature, ``serving_default``, with the names,
    the shapes and the layout of ``src``. ``NotTensorFlow`` where onnx2tf can't, ``UnsupportedHere`` without it."""
    _require_onnx2tf()
    report("saved_model_from_onnx: onnx2tf")
    refused: dict[str, str] = {}
    for rung in _RUNGS:
        with tempfile.TemporaryDirectory(prefix="onnx2tf-", dir=out.parent) as text:
            folder = Path(text)
            for name in (src.path.name, *src.companions):
                shutil.copyfile(src.path.parent / name, folder / name)
            try:
                run_with_keras2(
                    "accel.converters.saved_model_from_onnx:run_onnx2tf",
                    f"onnx2tf can't write {src.path.name} as a SavedModel",
                    config.timeout,
                    path=folder / src.path.name,
                    signature=src.signature,
                    rung=rung,
                    out=folder / "made",
                )
            except NotTensorFlow as error:
                refused[rung] = str(error)
                continue
            for part in sorted((folder / "made").iterdir()):
                part.rename(out.parent / part.name)
            break
    else:
        # The reason that names an operator says more than one that doesn't.
        raise NotTensorFlow(max(refused.values(), key=lambda reason: "the operator " in reason))
    main = out.parent / "saved_model.pb"
    rest = sorted(f for top in ("variables", "assets") for f in (out.parent / top).rglob("*") if f.is_file())
    rest += [f for f in (out.parent / "fingerprint.pb",) if f.is_file()]
    return Artifact(
        path=main,
        kind="tensorflow",
        signature=src.signature,
        properties={"form": "saved_model", "precision": src.properties.get("precision", "fp32")},
        notes={"onnx2tf": _version("onnx2tf"), "rung": rung, "refused": refused},
        companions=tuple(str(f.relative_to(out.parent)) for f in rest),
    )


def _require_onnx2tf() -> None:
    require_tensorflow()
    for name in ("onnx2tf", "tf_keras", "ai_edge_litert", "onnx_graphsurgeon", "sng4onnx"):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedHere(f"{name} is not installed, and its pins exclude accel's libraries; run: {ONNX2TF}")


def run_onnx2tf(path: Path, signature: Signature, rung: str, out: Path) -> None:
    """onnx2tf, then its model with the names, the order and the layout of ``signature``. In a child process."""
    import numpy as np
    import onnx2tf
    import tensorflow as tf

    first = out.with_name("first")
    try:
        onnx2tf.convert(
            input_onnx_file_path=str(path),
            output_folder_path=str(first),
            **_layout_option(rung, signature),
            output_signaturedefs=True,
            not_use_onnxsim=True,
            non_verbose=True,
        )
    except SystemExit as error:  # how onnx2tf ends where it can't go on
        raise NotTensorFlow(
            f"onnx2tf gave up on {_operator_of(error) or 'an operator'}; choose another --to"
        ) from error
    except Exception as error:  # whatever the part of onnx2tf or TensorFlow that failed raises
        place = _operator_of(error)
        at = f" (it was at {place})" if place else ""
        reason = one_line(f"{type(error).__name__}: {error}", 240)
        raise NotTensorFlow(
            f"onnx2tf can't write {path.name} as a SavedModel{at}: {reason}; choose another --to"
        ) from error
    loaded = tf.saved_model.load(str(first))
    function = loaded.signatures["serving_default"]
    taken = list(function.structured_input_signature[1])
    starts = _matched([spec.name for spec in signature.inputs], taken)
    shapes = [[d if isinstance(d, int) else None for d in spec.shape] for spec in signature.inputs]
    ends = [spec.name for spec in signature.outputs]
    given = list(function.structured_outputs)
    order = _matched(ends, given)
    turned = _turned(function, starts, order, signature, path, np)

    def call(*tensors: Any) -> dict[str, Any]:
        found = function(**{starts[spec.name]: t for spec, t in zip(signature.inputs, tensors, strict=True)})
        return {
            name: tf.transpose(found[order[name]], turned[name]) if turned[name] else tf.identity(found[order[name]])
            for name in ends
        }

    kinds = [
        tf.TensorSpec(shape, tf.as_dtype(spec.dtype), name=spec.name)
        for spec, shape in zip(signature.inputs, shapes, strict=True)
    ]
    module = tf.Module()
    module.inner = loaded
    tf.saved_model.save(module, str(out), signatures=tf.function(call).get_concrete_function(*kinds))


def _layout_option(rung: str, signature: Signature) -> dict[str, list[str]]:
    """What ``rung`` says to onnx2tf. It keeps channels first for inputs of 3 to 5 dims only, and refuses others there:
    those have no channels that it would move."""
    names = [s.name for s in signature.inputs if rung != "channels last inside" or len(s.shape) in (3, 4, 5)]
    return {_RUNGS[rung]: names} if names else {}


def _operator_of(error: BaseException) -> str:
    """The ONNX node that onnx2tf was at when it raised, as the operator and its name; empty where it was at none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("graph_node")
        if node is not None and hasattr(node, "op"):
            found = f"the operator {node.op} ({node.name})"
        trace = trace.tb_next
    return found


def _matched(wanted: list[str], given: list[str]) -> dict[str, str]:
    """Names of the file by the names that were asked for: onnx2tf replaces what Python can't spell."""

    def plain(name: str) -> str:
        return "".join(c if c.isalnum() else "_" for c in name).strip("_").lower()

    found = {}
    for name in wanted:
        same = [g for g in given if g == name] or [g for g in given if plain(g) == plain(name)]
        if not same and len(wanted) == len(given) == 1:
            same = given
        if not same:
            raise NotTensorFlow(f"onnx2tf lost the name {name!r} (it has {', '.join(given)}); choose another --to")
        found[name] = same[0]
    return found


def _turned(
    function: Any, starts: dict[str, str], order: dict[str, str], signature: Signature, path: Path, np: Any
) -> dict[str, list[int]]:
    """For each output the transposition that puts it back into the layout of the ONNX file (onnx2tf prefers channels
    last); empty where it is right. Found by running both: shapes alone can't tell a square from its transpose."""
    import itertools

    import onnxruntime
    import tensorflow as tf

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = signature.example_inputs(seed=7)
    names = [spec.name for spec in signature.outputs]
    wanted = dict(zip(names, session.run(names, feeds), strict=True))
    found = function(**{starts[name]: tf.constant(value) for name, value in feeds.items()})
    turned: dict[str, list[int]] = {}
    for name in names:
        value = found[order[name]].numpy()
        turned[name] = []
        fits = []
        for axes in itertools.permutations(range(value.ndim)):
            moved = value.transpose(axes)
            if moved.shape == wanted[name].shape:
                fits.append((float(np.abs(moved.astype(np.float64) - wanted[name]).max(initial=0.0)), list(axes)))
        if not fits:
            raise NotTensorFlow(
                f"onnx2tf made {list(value.shape)} of the output {name!r}, which is {list(wanted[name].shape)}; "
                "choose another --to"
            )
        off, best = min(fits)
        if off > _RIGHT * max(1.0, float(np.abs(wanted[name]).max(initial=0.0))):
            raise NotTensorFlow(f"what onnx2tf made computes another {name!r}, off by {off:.2g}; choose another --to")
        turned[name] = [] if best == sorted(best) else best
    return turned


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)
