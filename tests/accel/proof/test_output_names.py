"""Proves that two models whose outputs have other names are compared in the order of their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.artifact import Artifact
from tests.support.onnx_builder import FLOAT, INT64, artifact, node

IN_ORDER = "so they are compared in their order"


def two_outputs(
    path: Path, names: tuple[str, str], *, factor: float = 1.0, widths: tuple[int, int] = (3, 2)
) -> Artifact:
    """Makes a model with two outputs. An inner value has the name ``first``, as an output of the other model may."""
    rng = np.random.default_rng(0)
    first, second = names
    weights = {
        "v": rng.standard_normal((4, widths[0])).astype(np.float32),
        "w": rng.standard_normal((4, widths[1])).astype(np.float32) * np.float32(factor),
    }
    inner = "inside" if "first" in names else "first"
    nodes = [node("Relu", "x", inner), node("MatMul", f"{inner} v", first), node("MatMul", f"{inner} w", second)]
    ends = {first: (FLOAT, ["n", widths[0]]), second: (FLOAT, ["n", widths[1]])}
    return artifact(path, nodes, {"x": (FLOAT, ["n", 4])}, ends, weights)


@pytest.mark.parametrize("command", ["verify", "bisect"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_outputs_are_compared_in_order(cli: Any, tmp_path: Path, command: str, factor: float) -> None:
    """Fails if equal models differ because of their names, if the note is missing, or if a wrong output isn't found."""
    one = two_outputs(tmp_path / "one.onnx", ("first", "second"))
    two = two_outputs(tmp_path / "two.onnx", ("a", "b"), factor=factor)
    ran = cli(command, one.path, two.path, "-q")
    assert ran.code == (0 if factor == 1 else 1), ran.stderr
    said = " ".join((ran.stdout + ran.stderr).split())
    assert f"{IN_ORDER}: first with a, second with b" in said


@pytest.mark.parametrize("command", ["verify", "bisect"])
def test_outputs_that_differ_in_more_than_names(cli: Any, tmp_path: Path, command: str) -> None:
    """Fails if outputs of other shapes or dtypes, in another order, or in another number are compared, or if the
    message doesn't name the outputs of both models."""
    one = two_outputs(tmp_path / "one.onnx", ("first", "second"))
    shapes = two_outputs(tmp_path / "shapes.onnx", ("a", "b"), widths=(2, 3))
    swapped = two_outputs(tmp_path / "swapped.onnx", ("b", "first"))
    ends = {"a": (INT64, ["n", 3]), "b": (FLOAT, ["n", 2])}
    nodes = [node("Gemm", "x v", "f"), node("Cast", "f", "a", to=INT64), node("Gemm", "x w", "b")]
    weights = {"v": np.ones((4, 3), np.float32), "w": np.ones((4, 2), np.float32)}
    dtypes = artifact(tmp_path / "dtypes.onnx", nodes, {"x": (FLOAT, ["n", 4])}, ends, weights)
    fewer = artifact(
        tmp_path / "fewer.onnx", [node("Gemm", "x v", "a")], {"x": (FLOAT, ["n", 4])}, {"a": (FLOAT, ["n", 3])},
        {"v": weights["v"]},
    )  # fmt: skip
    for other in (shapes, swapped, dtypes, fewer):
        ran = cli(command, one.path, other.path, "-q")
        assert ran.code == 2, (other.path, ran.stdout)
        assert "first:float32[n,3], second:float32[n,2] and " in ran.stderr
        assert ", ".join(map(str, other.signature.outputs)) in ran.stderr
