"""Corrects the output shapes that an ONNX file declares, after a run has shown the actual shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from accel.artifact import Artifact, beside
from accel.errors import AccelError
from accel.progress import report
from accel.runtimes.base import open_session
from accel.signature import Dim, Signature

# The largest batch in the runs. Batches up to this size are enough to detect the batch dim of an output. A larger batch
# would take longer and show no more.
_LARGEST_BATCH = 3


def mend(path: Path, known: Signature) -> bool:
    """Runs the ONNX file ``path`` at several sizes. If the outputs have the shapes that ``known`` states, writes these
    shapes into the file. Exporters and quantizers declare fixed sizes or formulas for dims that they can't infer.

    Also removes the declared shapes of inner tensors, because these shapes may be wrong and runtimes may rely on them.
    If the file can't be run here, or if an output's shape differs from ``known``, returns False and leaves the file
    unchanged.
    """
    model = onnx.load(path, load_external_data=False)
    cases = known.cases(_LARGEST_BATCH)
    report("measuring the shapes of the outputs")
    shapes: dict[str, list[tuple[int, ...]]] = {spec.name: [] for spec in known.outputs}
    try:
        artifact = Artifact(path=path, kind="onnx", signature=known)
        with open_session(artifact, "onnxruntime", {"graph_level": "none"}) as session:
            for case in cases:
                for name, value in session.run(known.example_inputs(**case)).items():
                    shapes.get(name, []).append(value.shape)
    except AccelError:
        return False
    wanted = {spec.name: spec.shape for spec in known.outputs}
    if not all(_fits(wanted[name], cases, seen) for name, seen in shapes.items()):
        return False
    for output in model.graph.output:
        if output.name in wanted:
            _state(output.type.tensor_type.shape, wanted[output.name])
    del model.graph.value_info[:]
    with beside(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
    return True


def _fits(shape: Sequence[Dim], cases: Sequence[Mapping[str, int]], seen: Sequence[Sequence[int]]) -> bool:
    """Tells whether the measured shapes ``seen`` match the declared ``shape``. ``seen`` has one shape for each entry of
    ``cases``."""
    if len(seen) != len(cases) or any(len(one) != len(shape) for one in seen):
        return False
    for axis, dim in enumerate(shape):
        sizes = [one[axis] for one in seen]
        if isinstance(dim, int):
            expected = [dim] * len(cases)
        elif all(dim in case for case in cases):
            expected = [case[dim] for case in cases]
        else:  # a dim that is computed from input dims must not have the same size in all runs
            expected = sizes if len(set(sizes)) > 1 else []
        if sizes != expected:
            return False
    return True


def _state(stated: onnx.TensorShapeProto, shape: Sequence[Dim]) -> None:
    del stated.dim[:]
    for dim in shape:
        if isinstance(dim, int):
            stated.dim.add().dim_value = dim
        else:
            stated.dim.add().dim_param = dim
