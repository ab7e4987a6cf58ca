"""Converts ONNX models to TensorFlow SavedModels with onnx2tf."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.errors import UnsupportedHere, one_line
from accel.progress import report
from accel.signature import Signature
from accel.sources.tensorflow.process import require_tensorflow
from accel.stage import StageConfig
from accel.tables.limits import AXES_LIMIT

from .keras2_process import NotTensorFlow, run_with_keras2

# onnx2tf can't be an extra, because the pins of onnx2tf 1.29 (numpy 1.26, TensorFlow 2.19, protobuf 4...) conflict with
# every other part of accel. This command installs onnx2tf without its dependencies, because onnx2tf also runs with
# newer versions of its dependencies.
ONNX2TF = (
    "pip install --no-deps onnx2tf==1.29.24 ai-edge-litert==2.3.0 backports.strenum==1.2.8 tf-keras==2.21.0 "
    "onnx-graphsurgeon==0.6.1 sng4onnx==2.0.1 psutil==7.2.2"
)
# These options of onnx2tf keep the ONNX layout of the inputs. With the option keep_ncw_or_nchw_or_ncdhw_input_names,
# the SavedModel computes in the channels-last layout of TensorFlow's convolutions. With the option
# keep_shape_absolutely_input_names, onnx2tf adds no transposes. Models that were made from TensorFlow already have the
# necessary transposes.
_RUNGS = {
    "channels last inside": "keep_ncw_or_nchw_or_ncdhw_input_names",
    "as it is": "keep_shape_absolutely_input_names",
}


@dataclass(frozen=True, kw_only=True)
class SavedModelFromOnnxConfig(StageConfig):
    """onnx2tf is stopped after ``timeout`` seconds."""

    timeout: float = 1800.0


def saved_model_from_onnx(src: Artifact, config: SavedModelFromOnnxConfig, out: Path) -> Artifact:
    """Writes ``src`` as a SavedModel into the folder of ``out``.

    The SavedModel has one signature, ``serving_default``, with the names, shapes and layout of ``src``. Raises
    ``NotTensorFlow`` if onnx2tf can't convert the model, and ``UnsupportedHere`` if onnx2tf isn't installed.
    """
    _require_onnx2tf()
    report("saved_model_from_onnx: onnx2tf")
    refused: dict[str, NotTensorFlow] = {}
    for rung in _RUNGS:
        with tempfile.TemporaryDirectory(prefix="onnx2tf-", dir=out.parent) as text:
            folder = Path(text)
            for name in (src.path.name, *src.companions):
                shutil.copyfile(src.path.parent / name, folder / name)
            try:
                run_with_keras2(
                    "accel.converters.to_others.saved_model_from_onnx:run_onnx2tf",
                    f"onnx2tf can't write {src.path.name} as a SavedModel",
                    config.timeout,
                    path=folder / src.path.name,
                    signature=src.signature,
                    rung=rung,
                    out=folder / "made",
                )
            except NotTensorFlow as error:
                refused[rung] = error
                continue
            for part in sorted((folder / "made").iterdir()):
                part.rename(out.parent / part.name)
            break
    else:
        # If both layout options fail, raises the error that names an operator, because this error tells the user more.
        raise max(refused.values(), key=lambda error: bool(error.operator))
    main = out.parent / "saved_model.pb"
    rest = sorted(f for top in ("variables", "assets") for f in (out.parent / top).rglob("*") if f.is_file())
    rest += [f for f in (out.parent / "fingerprint.pb",) if f.is_file()]
    return Artifact(
        path=main,
        kind="tensorflow",
        signature=src.signature,
        properties={"form": "saved_model", "precision": src.properties.get("precision", "fp32")},
        notes={
            "onnx2tf": importlib.metadata.version("onnx2tf"),
            "rung": rung,
            "refused": {rung: str(error) for rung, error in refused.items()},
        },
        companions=tuple(str(f.relative_to(out.parent)) for f in rest),
    )


def _require_onnx2tf() -> None:
    require_tensorflow()
    for name in ("onnx2tf", "tf_keras", "ai_edge_litert", "onnx_graphsurgeon", "sng4onnx"):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedHere(
                f"the package {name} is not installed; accel has no extra for {name}, because the dependencies of "
                f"{name} conflict with the dependencies of accel; run: {ONNX2TF}"
            )


def run_onnx2tf(path: Path, signature: Signature, rung: str, out: Path) -> None:
    """Converts ``path`` with onnx2tf, and saves the model with the names, order and layout of ``signature``.

    Runs in a child process.
    """
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
    except SystemExit as error:  # onnx2tf calls sys.exit if it gives up
        place = _operator_of(error)
        raise NotTensorFlow(f"onnx2tf gave up on {place or 'an operator'}; choose another format").at(place) from error
    except Exception as error:  # onnx2tf and TensorFlow may raise any exception
        place = _operator_of(error)
        at = f" (at {place})" if place else ""
        reason = one_line(f"{type(error).__name__}: {error}", 240)
        message = f"onnx2tf can't write {path.name} as a SavedModel{at}: {reason}; choose another format"
        raise NotTensorFlow(message).at(place) from error
    loaded = tf.saved_model.load(str(first))
    function = loaded.signatures["serving_default"]
    taken = list(function.structured_input_signature[1])
    starts = _matched([spec.name for spec in signature.inputs], taken)
    shapes = [[d if isinstance(d, int) else None for d in spec.shape] for spec in signature.inputs]
    ends = [spec.name for spec in signature.outputs]
    given = list(function.structured_outputs)
    order = _numbered(ends, given) or _matched(ends, given)
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
    """Returns the arguments of onnx2tf for the layout option ``rung``.

    The option that keeps channels first takes only inputs of rank 3 to 5. Inputs of other ranks don't need this
    option, because onnx2tf never moves the channels of these inputs.
    """
    names = [s.name for s in signature.inputs if rung != "channels last inside" or len(s.shape) in (3, 4, 5)]
    return {_RUNGS[rung]: names} if names else {}


def _operator_of(error: BaseException) -> str:
    """Returns the operator and name of the ONNX node at which onnx2tf raised ``error``, or "" if unknown."""
    found, trace = "", error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("graph_node")
        if node is not None and hasattr(node, "op"):
            found = f"the operator {node.op} ({node.name})"
        trace = trace.tb_next
    return found


def _numbered(wanted: list[str], given: list[str]) -> dict[str, str]:
    """Maps the wanted outputs to the outputs of the SavedModel by number, if TensorFlow numbered them because it lost
    their names. Otherwise returns {}. ``_turned`` compares the values."""
    numbered = [f"output_{index}" for index in range(len(wanted))]
    return dict(zip(wanted, numbered, strict=True)) if set(given) == set(numbered) and set(wanted) != set(given) else {}


def _matched(wanted: list[str], given: list[str]) -> dict[str, str]:
    """Returns a dict that maps each wanted name to the name in the SavedModel. The names may differ, because onnx2tf
    replaces characters that a Python identifier can't have."""

    def plain(name: str) -> str:
        return "".join(c if c.isalnum() else "_" for c in name).strip("_").lower()

    found = {}
    for name in wanted:
        same = [g for g in given if g == name] or [g for g in given if plain(g) == plain(name)]
        if not same and len(wanted) == len(given) == 1:
            same = given
        if not same:
            raise NotTensorFlow(
                f"onnx2tf lost the tensor name {name!r} (the SavedModel has the names {', '.join(given)}); choose "
                "another format"
            )
        found[name] = same[0]
    return found


def _turned(
    function: Any, starts: dict[str, str], order: dict[str, str], signature: Signature, path: Path, np: Any
) -> dict[str, list[int]]:
    """Maps the name of each output to the permutation that transposes the output to the layout in the ONNX file.
    Outputs in the right layout get an empty list. Layouts may differ, because onnx2tf prefers channels last. Compares
    the values of the outputs, because the shape of a square output doesn't show a transposition. Raises
    ``NotTensorFlow`` if no transposition gives the right values.
    """
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
                f"onnx2tf changed the shape of the output {name!r} from {list(wanted[name].shape)} to "
                f"{list(value.shape)}; choose another format"
            )
        off, best = min(fits)
        if off > AXES_LIMIT * max(1.0, float(np.abs(wanted[name]).max(initial=0.0))):
            raise NotTensorFlow(
                f"onnx2tf changed the values of the output {name!r} by up to {off:.2g}; choose another format"
            )
        turned[name] = [] if best == sorted(best) else best
    return turned
