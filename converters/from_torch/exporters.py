"""Runs PyTorch's two exporters to ONNX. The exported files get the names and dims in the model's signature."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import ExportFailed
from accel.sources.onnx import weights as onnx_weights
from accel.sources.onnx.weights import read_detached

from ..graph import write as onnx_write
from ..graph.memory_weights import with_weights_in_memory
from ..graph.names import rename_values
from ..graph.padding import keep_zero_padding
from ..graph.sigmoids import exact_sigmoids
from ..graph.write import write_onnx
from .experts import every_expert
from .loops.as_scans import loops_as_scans
from .operators.table import translation_table
from .packed import with_packed_outputs
from .plain_attention import plain_attention
from .shortcuts.decompositions import few_decompositions
from .shortcuts.rules_by_operator import rules_by_operator
from .shortcuts.translations import kept_translations
from .size_arguments import size_arguments

if TYPE_CHECKING:
    import onnx


class NoComplexRule(ExportFailed):
    """Raised if accel can't compute an operator on complex numbers with real numbers."""


def example(src: Artifact) -> tuple[Any, ...]:
    """Returns example tensors for tracing the model.

    No dynamic dim has size 1, because exporters treat a size of 1 as a constant. All dynamic dims have different sizes
    if their ranges allow different sizes.
    """
    from accel.sources.torch.call import to_tensor

    sizes: dict[str, int] = {}
    for dim, bounds in src.signature.dims.items():
        # For a dim with a step, the exporter's symbol stands for the size divided by the step. The symbol must not be
        # 1, so the example's size is at least twice the step.
        size = max(bounds.opt, 2 * bounds.step)
        while size in sizes.values():
            size += bounds.step
        sizes[dim] = size if size <= bounds.max else bounds.opt
    feeds = src.signature.example_inputs(**sizes)
    return tuple(to_tensor(feeds[spec.name]) for spec in src.signature.inputs)


def dynamo(src: Artifact, opset: int, out: Path) -> list[str]:
    """Exports ``src`` with ``torch.export`` and translates the program to ONNX. Returns the conditions
    on sizes under which the program equals the model. Errors of torch are raised unchanged."""
    import torch

    from accel.sources.torch.dims import conditions_on_sizes, export_dim

    from .complex.numbers import in_real_numbers

    # torch.export records the conditions on the size of an open dim, such as ``if x.shape[1] > 512``. For a dim with a
    # range, it would leave out the conditions that the range decides, and record the range itself.
    steps = {name: bounds for name, bounds in src.signature.dims.items() if bounds.step != 1}
    dims = {name: export_dim(name, replace(bounds, min=bounds.step), open_end=True) for name, bounds in steps.items()}
    outputs = _output_names(src)
    module = named(src)

    def traced(dims: Mapping[str, Any]) -> Any:
        # torch.export finds out by itself which sum of dims an axis has.
        shapes = tuple(
            {axis: dims.get(d, torch.export.Dim.AUTO) for axis, d in enumerate(spec.shape) if isinstance(d, str)}
            for spec in src.signature.inputs
        )
        return torch.onnx.export(
            in_real_numbers(module, tensors, (shapes,)),
            tensors,
            dynamo=True,
            opset_version=opset,
            input_names=[spec.name for spec in src.signature.inputs],
            output_names=outputs,
            dynamic_shapes=(shapes,),
            external_data=False,
            optimize=True,
            verbose=False,
            custom_translation_table=translation_table(),
        )

    def program_of(dims: Mapping[str, Any]) -> Any:
        with few_decompositions() as done:
            try:
                program = traced(dims)
            except Exception:  # torch.export succeeded if the program was decomposed
                if not done:
                    raise
                program = None
        return traced(dims) if done and program is None else program  # PyTorch's own decomposition may succeed

    with contextlib.ExitStack() as stack:
        for block in (torch.no_grad(), kept_translations(), _exact_constants(), _no_collection()):
            stack.enter_context(block)
        for block in (every_expert(), plain_attention(), size_arguments()):
            stack.enter_context(block)
        stack.enter_context(rules_by_operator())
        stack.enter_context(_lengths_of_tensors(module))
        stack.enter_context(loops_as_scans(module))
        stack.enter_context(_roots())
        tensors = example(src)
        program = program_of(dims)
        if program is not None and _has_fixed_dims(src, program.model.graph):
            # For a named dim, torch.export has to prove the model's conditions on sizes for the whole range. It may
            # fail to prove a condition that holds. Without a name, it records the dim, and the gates run the file at
            # several sizes.
            program = program_of({})
    if program is None:
        raise ExportFailed("torch.onnx.export returned no program")
    conditions = conditions_on_sizes(program.exported_program, src.signature)
    weights = (value for value in module.state_dict().values() if isinstance(value, torch.Tensor))
    size = sum(tensor.nbytes for tensor in weights)
    if onnx_weights.DETACHED_BYTES < size <= min(onnx_write.ATTACHED_BYTES, onnx_write.SINGLE_FILE_BYTES):
        with with_weights_in_memory(program) as model:
            _finish_graph(src, model, out, outputs)
    elif size <= onnx_write.SINGLE_FILE_BYTES:
        _finish_graph(src, program.model_proto, out, outputs)
    else:
        with _apart(out) as exported:
            program.save(str(exported), external_data=True)
            del program
            _finish_graph(src, read_detached(exported), out, outputs)
    return conditions


def _has_fixed_dims(src: Artifact, graph: Any) -> bool:
    """Tells whether an input of the exported ``graph`` has a fixed size instead of a dynamic dim."""
    shapes = {value.name: value.shape for value in graph.inputs}
    return any(
        isinstance(wanted, str) and isinstance(found, int)
        for spec in src.signature.inputs
        for wanted, found in zip(spec.shape, shapes.get(spec.name) or (), strict=False)
    )


@contextlib.contextmanager
def _exact_constants() -> Iterator[None]:
    """Makes onnxscript remove only additions of exactly 0 and multiplications by exactly 1.

    The rules of onnxscript treat 1e-8 as 0 and 1.00001 as 1, so they would remove an eps that prevents a division by
    zero.
    """
    from onnxscript.rewriter._pattern_ir import Constant
    from onnxscript.rewriter.rules.common import _no_op

    patterns = (node for rule in _no_op.rules.rules for node in rule._target_pattern)
    constants = [value for node in patterns for value in node.inputs if isinstance(value, Constant)]
    before = [(value._rel_tol, value._abs_tol) for value in constants]
    for value in constants:
        value._rel_tol = value._abs_tol = 0.0
    try:
        yield
    finally:
        for value, (relative, absolute) in zip(constants, before, strict=True):
            value._rel_tol, value._abs_tol = relative, absolute


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Stops Python's search for unreachable objects. An export makes millions of objects that stay reachable, and the
    search would visit all of them many times."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _lengths_of_tensors(module: Any) -> Iterator[None]:
    """Makes ``len(x)`` of a tensor mean ``x.shape[0]`` in the code of ``module`` and its submodules.

    Python's own ``len`` has to return a number, so the exporters would record the example's length as a constant.
    """
    import torch

    own = len  # the loop below may also replace ``len`` in this file

    def length(value: Any) -> Any:
        return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else own(value)

    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    spaces = [vars(sys.modules[kind.__module__]) for kind in kinds if kind.__module__ in sys.modules]
    # The methods of a copied class don't use the globals of the class's module.
    spaces += [one.__globals__ for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
    spaces = [space for space in {id(space): space for space in spaces}.values() if "len" not in space]
    for space in spaces:
        space["len"] = length
    try:
        yield
    finally:
        for space in spaces:
            del space["len"]


@contextlib.contextmanager
def _roots() -> Iterator[None]:
    """Lets the exporters record ``math.sqrt`` of a tensor or of a dynamic size in the graph.

    Python's own ``math.sqrt`` has to return a number, so the exporters would record this number as a constant. The
    user's other threads still get numbers. Several threads may export at the same time: the last one restores Python's
    own function.
    """
    with _replacing:
        _exporting.append(threading.get_ident())
        math.sqrt = _root
    try:
        yield
    finally:
        with _replacing:
            _exporting.remove(threading.get_ident())
            if not _exporting:
                math.sqrt = _own_root


# Python's own ``math.sqrt``, and the threads that export now.
_own_root = math.sqrt
_exporting: list[int] = []
_replacing = threading.Lock()


def _root(x: Any) -> Any:
    """Returns a tensor or a symbol for the root of a tensor or a symbol if this thread exports."""
    import torch

    symbolic = isinstance(x, torch.Tensor | torch.SymInt | torch.SymFloat)
    # TorchDynamo, which reads this function, can't follow a question about threads.
    here = torch.compiler.is_dynamo_compiling() or threading.get_ident() in _exporting
    return x**0.5 if symbolic and here else _own_root(x)


@contextlib.contextmanager
def _apart(out: Path) -> Iterator[Path]:
    """Yields a path for an exporter to write to, in a temporary folder beside ``out``.

    For a large model, an exporter writes weight files beside the ONNX file, under names that the exporter chooses.
    """
    with tempfile.TemporaryDirectory(prefix="export-", dir=out.parent) as folder:
        yield Path(folder, "exported.onnx")


def _finish_graph(src: Artifact, model: onnx.ModelProto, out: Path, outputs: Sequence[str]) -> None:
    """Writes the exported ``model`` to ``out``, with the names and dims in the signature of ``src``.

    During the export, the outputs have unique names, because the graph may use the user's name of an output for an
    inner value. This function restores the names of the outputs. The signature's names of dims replace the exporter's
    symbols. If the signature has a fixed size for an output dim, the file declares the same fixed size. The output gate
    later runs the file at several shapes.
    """
    del model.graph.output[len(outputs) :]  # removes the outputs that with_packed_outputs appended
    if any(node.domain == "accel" for node in model.graph.node):
        from accel.kernels.onnx.export import add_functions

        add_functions(model)
    keep_zero_padding(model)
    exact_sigmoids(model)
    wanted = {old: spec.name for old, spec in zip(outputs, src.signature.outputs, strict=True)}
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)} - set(wanted)
    rename = {**{name: f"{name}_inner" for name in wanted.values() if name in taken}, **wanted}
    for name in (spec.name for spec in src.signature.inputs):
        rename.pop(name, None)
    rename_values(model.graph, rename)
    specs = {spec.name: spec for spec in (*src.signature.inputs, *src.signature.outputs)}
    symbols: dict[str, str] = {}
    for value in (*model.graph.input, *model.graph.output):
        for dim, asked in zip(value.type.tensor_type.shape.dim, specs[value.name].shape, strict=False):
            if isinstance(asked, str) and dim.dim_param and dim.dim_param != asked:
                symbols.setdefault(dim.dim_param, asked)
            elif isinstance(asked, int) and dim.dim_param:
                dim.dim_value = asked
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = symbols[dim.dim_param]
    write_onnx(model, out)


def legacy(src: Artifact, opset: int, out: Path) -> list[str]:
    """Exports ``src`` with the older exporter, which records the operators of one run on an example. TorchScript
    modules keep their branches and loops. Returns no conditions, because the older exporter finds none."""
    import torch

    outputs = _output_names(src)
    inputs = [spec.name for spec in src.signature.inputs]
    dynamic = {
        name: {axis: d for axis, d in enumerate(spec.shape) if isinstance(d, str)}
        for name, spec in zip((*inputs, *outputs), (*src.signature.inputs, *src.signature.outputs), strict=True)
    }
    module, tensors = named(src), example(src)
    with torch.no_grad(), every_expert(), plain_attention(), contextlib.ExitStack() as stack:
        if isinstance(module.module, torch.jit.ScriptModule):
            # The exporter can't trace a TorchScript module inside its wrapper, so torch.jit.trace first turns the
            # wrapper and the module into one TorchScript module. The combined module keeps the branches of the inner
            # module.
            module = torch.jit.trace(module, tensors, check_trace=False)
        else:
            module = stack.enter_context(with_packed_outputs(module, tensors))
        stack.enter_context(_lengths_of_tensors(module))
        stack.enter_context(_roots())
        exported = stack.enter_context(_apart(out))
        torch.onnx.export(
            module,
            tensors,
            str(exported),
            dynamo=False,
            opset_version=opset,
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={name: axes for name, axes in dynamic.items() if axes},
        )
        _finish_graph(src, read_detached(exported), out, outputs)
    return []


def _output_names(src: Artifact) -> list[str]:
    return [f"accel_output_{index}" for index in range(len(src.signature.outputs))]


def named(src: Artifact) -> Any:
    from accel.sources.torch.call import NamedModule
    from accel.sources.torch.source import module_of

    names = [spec.name for spec in src.signature.inputs]
    return NamedModule(module_of(src), names, [spec.name for spec in src.signature.outputs]).eval()
