"""Converts ONNX models to PyTorch programs (``.pt2``) whose weights are parameters, for further training."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.artifact import Artifact
from accel.errors import BuildFailed, StageFailed, shortened
from accel.progress import report
from accel.sources.onnx.file import opset_of, read_proto
from accel.sources.torch.call import to_tensor
from accel.sources.torch.dims import export_dim
from accel.sources.torch.quiet_export import one_export
from accel.stage import StageConfig

from .torch_operators import OPERATORS, OperatorNotThere, tensor

if TYPE_CHECKING:
    import onnx

# In models with an older opset, some operators differ from their translation in ``OPERATORS``. For example, Softmax
# flattens its input below opset 13.
_OPSET = 13


@dataclass(frozen=True, kw_only=True)
class TorchFromOnnxConfig(StageConfig):
    """Has no options."""


class NotTorch(BuildFailed):
    """The graph can't be exported as a PyTorch program."""


def torch_from_onnx(src: Artifact, config: TorchFromOnnxConfig, out: Path) -> Artifact:  # noqa: ARG001
    """Converts ``src`` to a PyTorch program, and writes the program to ``out`` (``.pt2``).

    ``torch.export.load(out).module()`` returns a module whose float weights are parameters. Raises ``OperatorNotThere``
    if operators have no translation to PyTorch, and ``NotTorch`` for other failures.
    """
    model = read_proto(src.path, weights=True)
    if opset_of(model) < _OPSET:
        raise NotTorch(
            f"{src.path.name} has opset {opset_of(model)}, but the conversion needs opset {_OPSET} or later; run "
            "accel export FILE --opset 17 first"
        )
    missing = sorted({n.op_type for n in model.graph.node if n.op_type not in (*OPERATORS, "Constant")})
    if missing:
        raise OperatorNotThere(
            f"the operators {', '.join(missing)} of {src.path.name} have no translation to PyTorch; export the part of "
            "the model without these operators"
        )
    report("torch_from_onnx")
    module = OnnxModule(model).eval()
    sizes = {d: min(max(r.opt, (2 + i) * r.step), r.max) for i, (d, r) in enumerate(src.signature.dims.items())}
    feeds = src.signature.example_inputs(**sizes)
    args = tuple(to_tensor(feeds[spec.name]) for spec in src.signature.inputs)
    program: torch.export.ExportedProgram | None = None
    # First tries an export without upper bounds, because a program with upper bounds refuses larger sizes. Some models
    # can only be exported with upper bounds.
    for bounded in (False, True):
        try:
            with one_export:
                shapes = (_dynamic(src, bounded),) if args else None
                program = torch.export.export(module, args, dynamic_shapes=shapes)
            break
        except StageFailed:
            raise
        except Exception as error:
            problem = error
    if program is None:
        raise NotTorch(
            f"{src.path.name} can't be written as a PyTorch program ({shortened(problem)}); choose another format"
        ) from problem
    written = io.BytesIO()  # torch's own file writer ends the process if the disk is full
    torch.export.save(program, written)
    out.write_bytes(written.getbuffer())
    return Artifact(
        path=out,
        kind="torch",
        signature=src.signature,
        properties={"precision": src.properties.get("precision", "fp32")},
        notes={"parameters": sum(p.numel() for p in module.parameters())},
    )


def _dynamic(src: Artifact, bounded: bool) -> tuple[dict[int, torch.export.Dim], ...]:
    """Returns the dynamic axes of each input, with upper bounds if ``bounded``."""
    dims = {
        name: export_dim(_symbol(name, i), r, open_end=not bounded)
        for i, (name, r) in enumerate(src.signature.dims.items())
        if r.min != r.max
    }
    return tuple(
        {axis: dims[d] for axis, d in enumerate(spec.shape) if isinstance(d, str) and d in dims}
        for spec in src.signature.inputs
    )


def _symbol(name: str, index: int) -> str:
    return name if name.isidentifier() else f"dim_{index}"


class OnnxModule(torch.nn.Module):
    """Runs an ONNX graph node by node. Float weights are parameters. Other constants are buffers or lists."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        from onnx import helper, numpy_helper

        graph = model.graph
        self.constants: dict[str, str] = {}
        self.sizes: dict[str, list[int] | int] = {}
        self.nodes: list[tuple[str, dict[str, Any], list[str], list[str]]] = []
        tensors = {t.name: t for t in graph.initializer}
        for node in graph.node:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "Constant":
                if "value" not in attributes:
                    raise OperatorNotThere(
                        f"the Constant node {node.output[0]!r} has no tensor; simplify the model first"
                    )
                tensors[node.output[0]] = attributes["value"]
                continue
            attributes = {k: numpy_helper.to_array(v) if hasattr(v, "raw_data") else v for k, v in attributes.items()}
            attributes["__outputs__"] = len(node.output)
            self.nodes.append((node.op_type, attributes, list(node.input), list(node.output)))
        for index, (name, constant) in enumerate(tensors.items()):
            array = numpy_helper.to_array(constant)
            if array.dtype.kind == "i" and array.ndim <= 1 and array.size <= 16:
                self.sizes[name] = array.tolist()
            value = to_tensor(array.copy())
            own = f"weight_{index}"
            if value.is_floating_point() and value.numel() > 1:
                self.register_parameter(own, torch.nn.Parameter(value))
            else:
                self.register_buffer(own, value)
            self.constants[name] = own
        self.inputs = [v.name for v in graph.input if v.name not in tensors]
        self.outputs = [v.name for v in graph.output]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the graph. Inputs and outputs are in the graph's order."""
        values: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for kind, attributes, inputs, outputs in self.nodes:
            among_sizes = any(isinstance(values.get(name), list | int | torch.SymInt) for name in inputs)
            given = [
                self._value(values, name, among_sizes or kind == "Range" or (kind in _SIZED and place > 0))
                for place, name in enumerate(inputs)
            ]
            while given and given[-1] is None:
                given.pop()
            found = OPERATORS[kind](attributes, *given)
            many = kind in ("Split", "TopK")
            values |= dict(zip(outputs, found if many else [found], strict=False))
        return tuple(tensor(self._value(values, name, False)) for name in self.outputs)

    def _value(self, values: Mapping[str, Any], name: str, as_size: bool) -> Any:
        """Returns the value called ``name``. If ``as_size``, returns constant axes or sizes as numbers instead of a
        tensor."""
        if not name:
            return None
        if name in values:
            return values[name]
        if as_size and name in self.sizes:
            size = self.sizes[name]
            return list(size) if isinstance(size, list) else size
        return getattr(self, self.constants[name])


_SIZED = frozenset(
    {
        "Reshape", "Squeeze", "Unsqueeze", "Slice", "Split", "Expand", "Pad", "Resize", "TopK",
        "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2",
    }
)  # fmt: skip
