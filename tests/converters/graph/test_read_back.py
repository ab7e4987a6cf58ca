"""Proves that accel reads the signature from the written file and compares the signature with the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.contract import check_contract
from accel.converters.graph import read_back
from accel.errors import SignatureDrift
from accel.signature import Signature, TensorSpec
from accel.tables.stage_table import get_stage


class Net(torch.nn.Module):
    """Computes y = 2x and z = x + 1, with the fault ``fault`` in the outputs. In the tests, a faulty stage saves this
    module as its result."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = x * 2, x + 1
        return {"name": (y,), "dtype": (y, z.double()), "added": (y, z, y - z)}.get(self.fault, (y, z))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Returns an ONNX file that computes y = 2x and z = x + 1 for any batch."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xyz"]
    nodes = [helper.make_node("Mul", ["x", "two"], ["y"]), helper.make_node("Add", ["x", "one"], ["z"])]
    constants = [numpy_helper.from_array(np.float32(n), name) for n, name in ((2, "two"), (1, "one"))]
    graph = helper.make_graph(nodes, "affine", values[:1], values[1:], constants)
    path = tmp_path / "affine.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))
    return path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("name", "stage torch_from_onnx lost the output 'z'; remaining: y"),
        ("batch", "stage torch_from_onnx turned the dim 'batch' of the input 'x' into 2"),
        (
            "dtype",
            "stage torch_from_onnx changed the dtype of the output 'z' to float64; the dtype has to stay float32",
        ),
        ("added", "stage torch_from_onnx added the output 'output_2'"),
    ],
)
def test_an_exported_program(
    source: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    """Fails if accel trusts the signature that a stage reports. The test's faulty stages report the source's signature
    instead of the written file's signature."""

    def planted(src: Artifact, config: Any, out: Path) -> Artifact:
        shapes = None if fault == "batch" else ({0: torch.export.Dim("batch", max=64)},)
        torch.export.save(torch.export.export(Net(fault), (torch.zeros(2, 4),), dynamic_shapes=shapes), out)
        return Artifact(path=out, kind="torch", signature=src.signature)

    monkeypatch.setattr("accel.converters.to_others.torch_from_onnx.torch_from_onnx", planted)
    folder = tmp_path / "out"
    if not fault:
        made = accel.export(source, to="torch", out=folder)
        assert made.signature == accel.Artifact.open(folder / "model.pt2").signature
        assert [str(spec) for spec in made.signature.outputs] == ["y:float32[batch,4]", "z:float32[batch,4]"]
        return
    with pytest.raises(SignatureDrift, match=words):
        accel.export(source, to="torch", out=folder)
    assert not (folder / "model.pt2").exists()


def test_a_program_that_ties_two_dims(tmp_path: Path) -> None:
    """Checks that two dims that have to be equal are read as equal, and that two independent dims are read as
    independent."""

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return x + m

    class Sizes(torch.nn.Module):
        def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return x.sum(0) + m.sum(0)

    rows, more = torch.export.Dim("rows", max=64), torch.export.Dim("more", max=64)
    for name, module, dims in (("tied", Sum(), (rows, rows)), ("loose", Sizes(), (rows, more))):
        zeros = (torch.zeros(3, 4), torch.zeros(3 if dims[0] is dims[1] else 5, 4))
        program = torch.export.export(module, zeros, dynamic_shapes=tuple({0: dim} for dim in dims))
        torch.export.save(program, tmp_path / f"{name}.pt2")
    y = TensorSpec("y", "float32", ("batch", 4))
    two, one = (
        Signature((TensorSpec("x", "float32", ("batch", 4)), TensorSpec("m", "float32", (dim, 4))), (y,))
        for dim in ("length", "batch")
    )
    assert read_back.torch(tmp_path / "tied.pt2", one)[0].inputs == one.inputs
    assert read_back.torch(tmp_path / "loose.pt2", two)[0].inputs == two.inputs
    assert read_back.torch(tmp_path / "tied.pt2", two)[0].inputs[1].shape == ("batch", 4)
    assert read_back.torch(tmp_path / "loose.pt2", one)[0].inputs[1].shape == ("m_0", 4)


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        ("in0 0=4", "out0", ""),
        ("in0", "out0", ""),
        ("in0 0=7", "out0", r"turned the dim 4 of the input 'x' into 7"),
        ("in0", "9", r"lost the output 'y'"),
        ("in1", "out0", r"lost the input 'x'"),
        ("in0", "out0 2 1 out0 9 out1 0=0", r"added the output 'out1'"),
    ],
)
def test_an_ncnn_net(source: Path, tmp_path: Path, start: str, end: str, words: str) -> None:
    """Fails if accel accepts an ncnn net with a missing input or output, an additional output, or an output of another
    size."""
    known = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 4)),))
    src = Artifact(path=source, kind="onnx", signature=known)
    param = tmp_path / "model.ncnn.param"
    last, _, rest = end.partition(" ")
    name, _, size = start.partition(" ")
    more = f"BinaryOp more {rest}\n" if rest else ""
    param.write_text(f"7767517\n2 2\nInput in 0 1 {name} {size}\nReLU r 1 1 {name} {last} 0=0\n{more}")
    stage = get_stage("ncnn_from_onnx")
    result = Artifact(path=param, kind="ncnn", signature=known)
    if not words:
        assert check_contract(stage, src, result).signature == known
        return
    with pytest.raises(SignatureDrift, match=words):
        check_contract(stage, src, result)
