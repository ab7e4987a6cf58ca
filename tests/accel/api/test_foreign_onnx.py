"""Proves that foreign ONNX files, such as files with incomplete input declarations, work or end in a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.errors import BadInputSpec, BadSource


@pytest.fixture
def choosy(tmp_path: Path) -> Path:
    """Makes a model with the inputs ``x`` and ``rate``. ``x`` has at least 20 samples, because the convolution is 20
    wide. ``rate`` is an index into a table of 3 rows."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("ReduceMean", ["c", "axes"], ["m"], name="mean", keepdims=0),
        helper.make_node("Gather", ["table", "rate"], ["r"], name="rate"),
        helper.make_node("Add", ["m", "r"], ["y"], name="sum"),
    ]
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    weights = {"w": np.ones((4, 1, 20), np.float32), "axes": np.array([2]), "table": table}
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, "samples"]),
            helper.make_tensor_value_info("rate", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path = tmp_path / "choosy.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_a_file_that_fails_at_guessed_sizes_asks_for_them(choosy: Path, tmp_path: Path) -> None:
    """Checks that accel asks the user for the sizes if the model can't run at guessed sizes. The model must not become
    a failed candidate, and the error must not be the runtime's own message."""
    with pytest.raises(BadInputSpec, match=r"choosy.onnx fails at .*samples.*dims={'NAME': 'MIN:OPT:MAX"):
        accel.optimize(choosy, target="ort-cpu", out=tmp_path / "out")


@pytest.mark.proof
def test_declared_sizes_and_values_are_used(choosy: Path, tmp_path: Path) -> None:
    """Checks that gates and benchmarks use the values that --input allows. In this test, --input allows only 2 for the
    input ``rate``."""
    result = accel.optimize(
        choosy,
        target="ort-cpu",
        out=tmp_path / "out",
        inputs=["rate:int64[]{2..2}", "x:float32[batch,1,32]"],
        rounds=5,
    )
    signature = result.artifact.signature
    assert signature.example_inputs()["rate"] == 2
    assert (signature.dims["samples"].min, signature.dims["samples"].max) == (32, 32)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("speed:int64[]", "has no input 'speed'"),
        ("rate:int32[]", "doesn't fit the model"),
        ("x:float32[batch,3,samples]", "doesn't fit the model"),
        ("x:float32[batch,1]", "doesn't fit the model"),
    ],
)
def test_what_contradicts_the_file_is_refused(given: str, words: str, choosy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputSpec, match=words):
        accel.optimize(choosy, target="ort-cpu", out=tmp_path / "out", inputs=[given])


@pytest.mark.proof
def test_a_factory_that_prints_does_not_break_json(cli: Any, my_model: Path, tmp_path: Path) -> None:
    """Checks that stdout holds only the JSON object, without the output of the user's code."""
    my_model.write_text(my_model.read_text().replace("def make():", "def make():\n    print('loading weights')"))
    ran = cli("export", f"{my_model}:make", "--input", "x:float32[batch,3,8,8]", "-o", tmp_path / "m.onnx", "--json")
    assert ran.code == 0
    assert json.loads(ran.stdout)["path"].endswith("m.onnx")
    assert "loading weights" in ran.stderr


def test_a_file_of_an_unknown_ending(tmp_path: Path) -> None:
    """Fails if the error for a file with an unknown ending says that the file doesn't exist."""
    path = tmp_path / "weights.model"
    path.write_bytes(b"PK")
    with pytest.raises(BadSource, match=r"the file ending of .* is unknown"):
        accel.export(path, out=tmp_path / "m.onnx")


def test_a_bf16_file_that_no_cpu_runs_becomes_an_engine(tmp_path: Path) -> None:
    """Checks that a bf16 file is accepted for a GPU that supports bf16, although ONNX Runtime's CPU kernels don't
    support bf16."""
    import ml_dtypes

    weight = np.random.default_rng(0).standard_normal((16, 8)).astype(ml_dtypes.bfloat16)
    kind = TensorProto.BFLOAT16
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 16])],
        [helper.make_tensor_value_info("y", kind, ["batch", 8])],
        [helper.make_tensor("w", kind, weight.shape, weight.tobytes(), raw=True)],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    result = accel.optimize(path, out=tmp_path / "out", target="tensorrt-rtx", compute_capabilities=["8.9"])
    assert result.chosen == "tensorrt-rtx bf16"


@pytest.fixture
def capital(tmp_path: Path) -> Path:
    """Makes a model whose dim has a name that a library of formulas takes for a function: ``N``."""
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [rows],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8])],
    )
    path = tmp_path / "capital.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_a_dim_called_n_has_the_range_that_the_user_declares(capital: Path, tmp_path: Path, cli: Any) -> None:
    """Fails if a command doesn't take the range of a dim called ``N``, or measures at another size."""
    ran = cli("export", capital, "--dim", "N=2:16:64", "-o", tmp_path / "n.onnx", "--json")
    assert ran.code == 0, ran.stderr
    made = accel.load(tmp_path / "n.onnx")
    assert str(made.signature.dims["N"]) == "2:16:64"
    made.close()
    ran = cli("bench", capital, "--dim", "N=2:5:64", "--rounds", "5", "--budget-seconds", "1", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["sizes"]["N"] == 5
    words = ("--target", "ort-cpu", "--precision", "fp32", "--budget-seconds", "1", "--fixed-session")
    ran = cli("optimize", capital, "--dim", "N=2:7:64", *words, "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.stderr
    made = accel.load(json.loads(ran.stdout)["path"])
    assert str(made.signature.dims["N"]) == "2:7:64"
    made.close()


def test_a_range_for_a_dim_that_is_not_there_is_refused(capital: Path, tmp_path: Path, cli: Any) -> None:
    """Fails if a command ignores the range of an unknown dim, doesn't name the known dims, or takes no range where the
    dim is declared but gives an advice that fails."""
    out = ("-o", tmp_path / "out.onnx")
    for command, *more in (
        ("export", *out),
        ("bench",),
        ("bench", "--batch", "1,2"),
        ("optimize", "-o", tmp_path / "out"),
    ):
        ran = cli(command, capital, "--dim", "n=2:16:64", *more)
        assert ran.code == 2, ran.stdout
        assert "dim" in ran.stderr
        assert "'n'" in ran.stderr
        assert ran.stderr.strip().endswith(" N"), ran.stderr
    ran = cli("export", capital, "--input", "x:float32[N:2:16:64,8]", *out)
    assert ran.code == 2
    assert "write a number or a name like N, and its range apart, as --dim N=2:16:64" in ran.stderr
    ran = cli("export", capital, "--input", "x:float32[N,8]", "--dim", "N=2:16:64", "-o", tmp_path / "n.onnx")
    assert ran.code == 0, ran.stderr


def test_bench_draws_the_integers_that_the_user_declares(tmp_path: Path, cli: Any) -> None:
    """Fails if ``accel bench`` of an ONNX file draws integers outside the bounds that ``--input`` declares. Here, the
    model fails for every index except the last one of the length."""
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
        helper.make_node("Sub", ["rows", "last"], ["from"]),
        helper.make_node("Slice", ["x", "from", "rows"], ["one"]),  # the last row alone
        helper.make_node("Sub", ["i", "from"], ["index"]),
        helper.make_node("Gather", ["one", "index"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8]),
            helper.make_tensor_value_info("i", TensorProto.INT64, ["K"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["K", 8])],
        [numpy_helper.from_array(np.array([1]), "last")],
    )
    path = tmp_path / "last.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    ran = cli("bench", path, "--input", "i:int64[K]{N-1..N-1}", "--rounds", "5", "--budget-seconds", "1", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["results"][0]["error"] is None
