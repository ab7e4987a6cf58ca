"""Reads ONNX files, describes their inputs and outputs, checks them in a child process, and opens them as a source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, combined_sha256, file_sha256, manifest_path
from accel.cache import StageCache
from accel.child import run_in_child
from accel.errors import BadInputSpec, ChildCrashed, InvalidModel
from accel.errors import one_line as one_line
from accel.signature import Dim, DimRange, Signature, TensorSpec
from accel.spelling import option

from ..nearby import or_nearby
from .light import read_light
from .output_shapes import inputs_without_shape, misfit, with_input_shapes, with_output_shapes, without_shape
from .refusal import plain_reason, refused_by_checker
from .value_spec import inputs_with_defaults, optional_inputs, spec_of

if TYPE_CHECKING:
    import onnx

# The metadata key of a node's module path. torch's exporter writes this key.
NAME_SCOPES = "pkg.torch.onnx.name_scopes"

# The name under which the cache keeps the results of ``check``. If ``check`` changes, this name has to change too,
# because results of the old ``check`` may still be in the cache.
PROBED = "probed-3"

# Tensors of at most this size are read into memory, because graph rewrites and shape inference need their values.
SMALL_BYTES = 1 << 16
# Smaller files are parsed quickly.
_LARGE_FILE_BYTES = 1 << 24

_QUANTIZED_OPS = frozenset(
    {
        "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "MatMulNBits", "QLinearMatMul", "QuantizeLinear",
    }
)  # fmt: skip
_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}


def read_proto(path: Path, *, weights: bool = False) -> onnx.ModelProto:
    """Reads the ONNX model in ``path``. Without ``weights``, leaves out the external data. Outputs without a declared
    shape get the shape that onnx infers. Raises ``InvalidModel`` if the file is missing, empty or no ONNX model."""
    return with_output_shapes(_read_as_is(path, weights))


def _read_as_is(path: Path, weights: bool = False) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise InvalidModel(f"{path} does not exist; {or_nearby(str(path))}")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; export it again")
    try:
        model = onnx.load(str(path), load_external_data=weights)
    except DecodeError as error:
        raise InvalidModel(f"{path} is not an ONNX file or is truncated; export it again") from error
    except (onnx.checker.ValidationError, ValueError) as error:
        raise InvalidModel(
            f"{path}: {one_line(error)}; export the model again with its external data in the same folder"
        ) from error
    if not model.HasField("graph") or not model.ir_version:
        raise InvalidModel(f"{path} holds no ONNX graph; export it again")
    return model


def read_without_weights(path: Path) -> onnx.ModelProto:
    """Reads the ONNX model in ``path``. Weights of more than ``SMALL_BYTES`` may have no values. Raises
    ``InvalidModel`` in the same cases as ``read_proto``."""
    return with_output_shapes(_light_as_is(path))


def _light_as_is(path: Path) -> onnx.ModelProto:
    from google.protobuf.message import DecodeError

    if path.is_file() and path.stat().st_size > _LARGE_FILE_BYTES:
        with contextlib.suppress(ValueError, DecodeError):  # read_proto says what is wrong with the file
            return read_light(path, SMALL_BYTES, detached=False)
    return _read_as_is(path)


def external_files(model: onnx.ModelProto) -> tuple[str, ...]:
    """Returns the names of the model's external data files. Raises ``InvalidModel`` for a data file outside the model's
    folder."""
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    names: dict[str, None] = {}
    for tensor in _get_all_tensors(model):
        if uses_external_data(tensor):
            location = next((e.value for e in tensor.external_data if e.key == "location"), "")
            if not location or Path(location).name != location:
                raise InvalidModel(
                    f"tensor {tensor.name!r} points to the file {location!r} outside the model's folder; move that "
                    "file into the folder, and save the model again"
                )
            names[location] = None
    return tuple(names)


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of ``graph``, and the nodes of the subgraphs in their attributes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from all_nodes(inner)


def opset_of(model: onnx.ModelProto) -> int:
    """Returns the version of the default operator set."""
    return next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def describe(path: Path, inputs: Sequence[TensorSpec] = ()) -> tuple[Signature, dict[str, Any]]:
    """Returns the model's signature as the file declares it, and the model's opset, IR version, precision and float
    dtypes. ``inputs`` gives the shapes of inputs for which the file declares none.

    Dims without a name in the file are called ``<tensor>_<axis>``. The precision is ``int4``, ``fp8`` or ``int8`` if
    the file has weights, QDQ nodes or integer matrix products of this precision. Otherwise, the majority of the float
    weights determines the precision.
    """
    model = with_output_shapes(with_input_shapes(_light_as_is(path), inputs))
    if inputs and without_shape(model) and (fault := misfit(model)):
        raise BadInputSpec(f"the shapes in {option('inputs')} don't fit {path} ({fault}); correct them")
    return describe_model(model)


def undeclared_inputs(path: Path) -> frozenset[str]:
    """Returns the names of the inputs for which the file declares no shape."""
    return frozenset(inputs_without_shape(_light_as_is(path)))


# Marks models with one of the operators in ``_SCALED_AT_RUN_TIME``. A dynamic quantization operator computes one scale
# for all rows of a batch, so each row influences the results of the other rows.
ROWS_SHARE_SCALES = "rows_share_scales"
_SCALED_AT_RUN_TIME = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM")


# Marks models with functions of their own, which only ONNX Runtime reads.
OWN_FUNCTIONS = "own_functions"

# Marks models with weights in the packed form of accel's CPU kernels (``accel.kernels.onnx.packed``).
PACKED_WEIGHTS = "packed_weights"
_ACCEL = "accel"  # the domain of accel's operators


def _packed_products(model: onnx.ModelProto) -> dict[str, int]:
    """Returns the bits of the weights in accel's packed products, the only operators of accel with this attribute, by
    the name of their scales."""
    own = (node for node in model.graph.node if node.domain == _ACCEL)
    return {node.input[2]: a.i for node in own for a in node.attribute if a.name == "bits" and len(node.input) > 2}


def describe_model(model: onnx.ModelProto) -> tuple[Signature, dict[str, Any]]:
    """Returns the signature and the properties of a model in memory (see ``describe``)."""
    initializers = {t.name for t in model.graph.initializer}
    inputs = tuple(spec_of(v, is_input=True) for v in model.graph.input if v.name not in initializers)
    outputs = tuple(spec_of(v) for v in model.graph.output)
    bounds = _index_bounds(model)
    inputs = tuple(replace(spec, values=_held(spec, bounds.get(spec.name))) for spec in inputs)
    properties = {
        "opset": opset_of(model),
        "ir": int(model.ir_version),
        "precision": _precision(model),
        "floats": _floats(model),
    }
    if any(node.op_type in _SCALED_AT_RUN_TIME for node in model.graph.node):
        properties[ROWS_SHARE_SCALES] = True
    if _packed_products(model):
        properties[PACKED_WEIGHTS] = True
    if model.functions:
        properties[OWN_FUNCTIONS] = True
    return Signature(inputs, outputs, optional=optional_inputs(model)), properties


def _index_bounds(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """Returns the smallest and largest valid index for each integer input that selects rows of a constant table, such
    as an embedding."""
    rows = {t.name: int(t.dims[0]) for t in model.graph.initializer if t.dims}
    origin = {v.name: v.name for v in model.graph.input if v.name not in rows}
    bounds: dict[str, tuple[int, int]] = {}
    for node in model.graph.node:
        if node.op_type in ("Cast", "Identity", "DequantizeLinear") and node.input[0] in rows:
            rows[node.output[0]] = rows[node.input[0]]
        if node.op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze") and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        if node.op_type == "Gather" and node.input[0] in rows and node.input[1] in origin:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            if axis == 0:
                name, last = origin[node.input[1]], rows[node.input[0]] - 1
                bounds[name] = (0, min(last, bounds[name][1]) if name in bounds else last)
    return bounds


def _held(spec: TensorSpec, bounds: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns ``bounds`` as far as the dtype of ``spec`` holds them."""
    limits = spec.dtype_range
    return bounds if bounds is None or limits is None else (bounds[0], min(bounds[1], limits[1]))


def _precision(model: onnx.ModelProto) -> str:
    from onnx import TensorProto

    ops = {node.op_type for node in model.graph.node}
    four = any(
        a.name == "bits" and a.i == 4 for n in model.graph.node if n.op_type == "MatMulNBits" for a in n.attribute
    )
    packed = set(_packed_products(model).values())
    int4 = any(t.data_type in (TensorProto.INT4, TensorProto.UINT4) for t in model.graph.initializer)
    if four or int4 or 4 in packed:
        return "int4"
    if any(t.data_type in (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2) for t in model.graph.initializer):
        return "fp8"
    if packed or ops & _QUANTIZED_OPS:
        return "int8"
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            name = TensorProto.DataType.Name(tensor.data_type).lower()
            count = 1
            for dim in tensor.dims:
                count *= int(dim)
            sizes[name] = sizes.get(name, 0) + count
    main = max(sizes, key=lambda name: sizes[name], default="float")
    return _PRECISIONS.get(main, "fp32")


_ATTENTION = "GroupQueryAttention"


def _floats(model: onnx.ModelProto) -> list[str]:
    """Returns the float dtypes of the inputs, weights and casts of a model. No value is computed in the dtype of the
    scales of packed weights. ONNX Runtime's attention for decoders has kernels of its own for a float16 cache, and its
    values round as they do there."""
    from onnx import TensorProto

    names = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
    scales = _packed_products(model)
    found = {tensor.data_type for tensor in model.graph.initializer if tensor.name not in scales}
    read = {name for node in model.graph.node if node.op_type != _ATTENTION for name in node.input}
    own = {name for node in model.graph.node if node.op_type == _ATTENTION for name in node.input} - read
    found |= {value.type.tensor_type.elem_type for value in model.graph.input if value.name not in own}
    casts = [node for node in model.graph.node if node.op_type == "Cast" and node.output[0] not in own]
    found |= {a.i for node in casts for a in node.attribute if a.name == "to"}
    return sorted(name for kind, name in names.items() if kind in found)


def open_onnx(
    path: Path,
    *,
    dims: Mapping[str, DimRange] | None = None,
    inputs: Sequence[TensorSpec] = (),
    cache: StageCache | None = None,
    probe: bool = True,
) -> Artifact:
    """Opens an ONNX file as an artifact. If the file has a manifest, the artifact keeps the manifest's history.

    ``dims`` gives new ranges of dynamic dims. ``inputs`` gives ranges of integer inputs, sizes of dims that the file
    leaves open, and the shapes of inputs without a shape. With ``probe``, a file without a manifest is first loaded by
    the ONNX checker and by ONNX Runtime in a child process. The child process protects this process from a hostile file
    that crashes its reader. The result of the probe is cached under the hash of the file.

    Raises ``InvalidModel`` if the file is damaged or differs from its manifest, and ``BadInputSpec`` if ``dims`` or
    ``inputs`` don't match the model.
    """
    if probe and without_shape(_light_as_is(path)):
        # The inference of shapes is native code, which a hostile file may crash.
        probe_apart(path, combined_sha256([file_sha256(path)]), cache or StageCache())
    signature, properties = describe(path, inputs)
    if not signature.outputs:
        raise InvalidModel(f"{path} has no outputs; export the model again")
    files = (path, *(path.with_name(name) for name in external_files(read_without_weights(path))))
    for file in files[1:]:
        if not file.is_file():
            raise InvalidModel(
                f"{path} keeps its weights in the file {file.name}, which is missing; put this file into the same "
                "folder"
            )
    if manifest_path(path).is_file():
        artifact = Artifact.open(path)
        assert artifact.manifest is not None
        if artifact.hashes() != dict(artifact.manifest.files):
            raise InvalidModel(
                f"{path} is not the file its manifest describes (its sha256 differs); export it again, or delete "
                f"{manifest_path(path).name} to take the file as it is"
            )
    else:
        artifact = Artifact(
            path=path,
            kind="onnx",
            signature=signature,
            properties=properties,
            companions=tuple(f.name for f in files[1:]),
        )
        hashes = artifact.hashes()
        if probe:
            probe_apart(path, artifact.digest, cache or StageCache())
        source = {"kind": "onnx", "spec": str(path), "files": [_file_entry(f, hashes[f.name]) for f in files]}
        if producer := read_without_weights(path).producer_name:
            source["producer"] = producer
        if defaults := [spec.name for spec in inputs_with_defaults(read_without_weights(path))]:
            source["defaults"] = defaults
        artifact = replace(artifact, source=source)
    if inputs:
        artifact = replace(artifact, signature=_declared(artifact.signature, inputs))
    if dims:
        artifact = replace(artifact, signature=_with_ranges(artifact.signature, dims))
    return artifact


def _file_entry(path: Path, sha256: str) -> dict[str, str]:
    return {"path": str(path.absolute()), "sha256": sha256}


def _declared(signature: Signature, inputs: Sequence[TensorSpec]) -> Signature:
    """Returns ``signature`` with the value ranges and sizes that ``inputs`` declares.

    Raises ``BadInputSpec`` if a name, dtype, rank or fixed size differs from the file.
    """
    given = {spec.name: spec for spec in inputs}
    if strange := [name for name in given if name not in {spec.name for spec in signature.inputs}]:
        raise BadInputSpec(f"the model has no input {strange[0]!r}; it takes {signature.describe_inputs()}")
    dims: dict[str, DimRange] = {}
    names: dict[str, Dim] = {}
    specs = []
    for own in signature.inputs:
        said = given.get(own.name, own)
        fits = (said.dtype, len(said.shape)) == (own.dtype, len(own.shape))
        for mine, theirs in zip(own.shape, said.shape, strict=False):
            fits = fits and (mine == theirs or isinstance(mine, str))
            if isinstance(theirs, str):
                names[theirs] = mine
            if isinstance(mine, str) and isinstance(theirs, int):
                fits = fits and dims.setdefault(mine, DimRange(theirs, theirs, theirs)).opt == theirs
        if not fits:
            raise BadInputSpec(
                f"{option('inputs', [said])} doesn't fit the model, which takes {own}; change only the sizes or the "
                "range of values"
            )
        specs.append((own, said))
    inputs_said = tuple(
        own if said.values is None else replace(own, values=said.with_dims(names).values, seen=None)
        for own, said in specs
    )
    return replace(signature, inputs=inputs_said).with_dims(dims)


def _with_ranges(signature: Signature, dims: Mapping[str, DimRange]) -> Signature:
    for dim in dims:
        if dim not in signature.dims:
            has = ", ".join(signature.dims) or "none"
            raise BadInputSpec(f"the model has no dynamic dim {dim!r}; it has: {has}")
    return signature.with_dims(dims)


def probe_apart(path: Path, digest: str, cache: StageCache, *, crashes_only: bool = False) -> None:
    """Raises ``InvalidModel`` if the checker or ONNX Runtime crashes on the file or refuses the file. The checker and
    ONNX Runtime run in a child process. With ``crashes_only``, raises only for a crash. ``cache`` stores the result for
    each ``digest``."""
    found = cache.get_record(PROBED, digest)
    if found is None:
        try:
            refused = run_in_child("accel.sources.onnx.file:check", timeout=600, path=path)
            found = {"error": refused, "crashed": False}
        except ChildCrashed as error:
            found = {"error": f"it crashes the native parser ({error})", "crashed": True}
        except TimeoutError:
            found = {"error": "it keeps the native parser busy for more than ten minutes", "crashed": True}
        cache.put_record(PROBED, digest, found)
    if found["error"] and (found["crashed"] or not crashes_only):
        raise InvalidModel(f"{path}: {found['error']}; export the model again")


def check(path: Path) -> str | None:
    """Returns the reason why the checker or ONNX Runtime refuses the file, in one line. Returns None if the checker and
    ONNX Runtime accept the file."""
    import onnxruntime

    model = _light_as_is(path)
    inferred = bool(without_shape(model))
    model = with_output_shapes(model)
    if not without_shape(model) and (
        fault := refused_by_checker(model if inferred else str(path), lambda: model.graph.node)
    ):
        return fault
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return None  # the model is valid, but this CPU lacks a kernel, for example for bfloat16
    except Exception as error:
        return plain_reason(error)
    return None
