"""Proves that accel verify compares outputs by name, and reports every difference beyond the limit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import accel
from accel.artifact import Artifact, Manifest, manifest_path
from accel.errors import BadData
from accel.proof.compare import compare, difference
from accel.proof.data import Dataset
from accel.signature import Signature, TensorSpec
from tests.support import onnx_builder as build

floats = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=st.floats(-100, 100, width=32)
)


@given(floats, st.floats(1e-3, 10))
def test_a_difference_is_what_was_added(value: np.ndarray, delta: float) -> None:
    """Checks that the reported largest difference is the planted difference, and that equal outputs are reported as
    equal."""
    assert difference("y", value, value).max_abs == 0
    moved = value.astype(np.float64)
    moved.flat[0] += delta
    found = difference("y", value, moved)
    assert found.max_abs == pytest.approx(delta, rel=1e-9)
    norm = np.linalg.norm(value.astype(np.float64))
    if norm:
        assert found.rel_l2 == pytest.approx(delta / norm, rel=1e-9)


def test_nan_is_never_close() -> None:
    """Fails if a NaN or an infinity passes although the reference has a finite number."""
    good = np.array([1.0, 2.0], np.float32)
    for bad in (np.nan, np.inf):
        found = difference("y", good, np.array([1.0, bad], np.float32))
        assert found.problem
        assert found.rel_l2 == np.inf
    masked = np.array([1.0, -np.inf], np.float32)
    assert difference("y", masked, masked).rel_l2 == 0


def test_outputs_are_matched_by_name() -> None:
    """Fails if outputs in another order are compared by position, or if a missing output goes unnoticed."""
    a, b = np.zeros(2), np.ones(2)
    assert all(d.max_abs == 0 for d in compare({"a": a, "b": b}, {"b": b, "a": a}))
    assert compare({"a": a}, {"b": b})[0].problem.startswith("it is missing")
    assert "its shape is [3]" in compare({"a": a}, {"a": np.zeros(3)})[0].problem


def test_the_command(cli: Any, minilm: Artifact, minilm_data: Path) -> None:
    """Fails if verify rejects a correct export on real text."""
    ran = cli("verify", "accel.examples.minilm:model", minilm.path, "--data", minilm_data, "--json")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["passed"] is True
    assert body["outputs"]["embedding"]["max_abs"] < 1e-5


FACTORY = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)
"""


def test_a_factory_that_says_nothing_of_its_inputs(cli: Any, tmp_path: Path) -> None:
    """Fails if verify ignores --input or --weights when the reference or the candidate is a factory. Also fails if
    verify accepts a factory's net that has other weights than the ONNX file. The error must advise the user to pass the
    weights of the original export. If the manifest records no weights, or if neither model is a factory, the error must
    not advise the user to pass weights."""
    import torch
    from safetensors.torch import save_file

    factory = f"{tmp_path / 'net.py'}:make"
    (tmp_path / "net.py").write_text(FACTORY)
    save_file({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}, str(tmp_path / "w.safetensors"))
    said = ["--input", "x:float32[batch,3]", "--weights", tmp_path / "w.safetensors"]
    ran = cli("export", factory, *said, "-o", tmp_path / "net.onnx", "-q")
    assert ran.code == 0, ran.stderr
    for pair in ((factory, tmp_path / "net.onnx"), (tmp_path / "net.onnx", factory)):
        ran = cli("verify", *pair, *said, "-q")
        assert ran.code == 0, ran.stderr
        ran = cli("verify", *pair, *said[:2], "--json", "-q")
        assert ran.code == 1
        advice = f"was made with weights; pass --weights {tmp_path / 'w.safetensors'}"
        assert json.loads(ran.stdout)["problems"][-1].endswith(advice)
    bare = tmp_path / "bare.onnx"
    bare.write_bytes((tmp_path / "net.onnx").read_bytes())
    for pair in ((factory, bare), (bare, tmp_path / "net.onnx")):
        assert "pass --weights" not in cli("verify", *pair, *said[:2], "--json", "-q").stdout
    ran = cli("verify", tmp_path / "net.onnx", tmp_path / "net.onnx", *said[2:], "-q")
    assert ran.code == 2
    assert "leave out --weights" in ran.stderr


@pytest.mark.proof
def test_the_other_side_says_what_a_source_takes(cli: Any, tmp_path: Path) -> None:
    """Checks that verify and bench take the inputs and ranges of a factory without declared inputs from the other
    model. The net fails outside the ranges, for example at 12 positions or with token 20."""
    factory = f"{tmp_path / 'tokens.py'}:make"
    (tmp_path / "tokens.py").write_text(
        "import torch\n\n\nclass Tokens(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        torch.manual_seed(0)\n        self.words = torch.nn.Embedding(20, 4)\n"
        "        self.places = torch.nn.Embedding(11, 4)\n\n    def forward(self, ids):\n"
        "        return self.words(ids) + self.places(torch.arange(ids.shape[1]))\n\n\n"
        "def make():\n    return Tokens()\n"
    )
    said = ["--input", "ids:int64[batch,n]{0..19}", "--dim", "n=2:5:11", "--dim", "batch=1:2:3"]
    ran = cli("export", factory, *said, "-o", tmp_path / "tokens.onnx", "-q")
    assert ran.code == 0, ran.stderr
    bare = tmp_path / "bare.onnx"
    bare.write_bytes((tmp_path / "tokens.onnx").read_bytes())
    made = tmp_path / "tokens.onnx"
    for pair in ((factory, made), (made, factory), (made, bare), (bare, made)):
        ran = cli("verify", *pair, "--json", "-q")
        assert ran.code == 0, ran.stderr
        assert any("n=11" in case for case in json.loads(ran.stdout)["cases"])
        assert not any("n=12" in case or "n=64" in case for case in json.loads(ran.stdout)["cases"])
    assert "pass --input" in cli("verify", factory, factory, "-q").stderr
    quick = ["--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0", "-q"]
    ran = cli("bench", made, "--against", factory, *quick)
    assert ran.code == 0, ran.stderr


def test_a_different_model_fails(cli: Any, digits: Artifact, tmp_path: Path) -> None:
    """Checks that verify rejects a changed weight, and that the report says which output differs and by how much."""
    model = onnx.load(str(digits.path))
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4)
    values = onnx.numpy_helper.to_array(tensor) * np.float32(1.1)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    other = tmp_path / "other.onnx"
    onnx.save(model, str(other))
    ran = cli("verify", digits.path, other, "--json")
    assert ran.code == 1
    body = json.loads(ran.stdout)
    assert body["passed"] is False
    assert "output 'logits': rel_l2" in body["problems"][0]


def scaled(path: Path, factor: float) -> Artifact:
    shape = (build.FLOAT, ["batch", 2])
    return build.artifact(path, [build.node("Mul", "x k", "y")], {"x": shape}, {"y": shape}, {"k": np.float32(factor)})


def test_the_result_shows_its_numbers(cli: Any, tmp_path: Path) -> None:
    """Fails if a result doesn't show the largest error and its limit without ``table()``, if it leaves out an output
    of several, or if the command hides the numbers."""
    one, near = scaled(tmp_path / "one.onnx", 1.0), scaled(tmp_path / "near.onnx", 1.0001)
    found = accel.verify(one, near)
    error = f"{found.outputs['y'].rel_l2:.2g}"
    said = f"same within the limit 0.001, with a relative error of {error} at most"
    assert repr(found) == f"<accel verification: {said}; {len(found.cases)} shapes>"
    assert said in " ".join(cli("verify", one.path, near.path).stdout.split())
    more = replace(found, outputs={name: replace(found.outputs["y"], output=name) for name in "abcdef"})
    assert f"; rel l2: a {error}, b {error}, c {error}, d {error} and 2 more; " in repr(more)


def test_random_inputs_are_named_where_they_matter(cli: Any, tmp_path: Path) -> None:
    """Checks that verify advises the user to pass data when a quantized model differs on random inputs. Also fails if
    verify asks for data when a float model differs, or when the comparison already used data. The command's table must
    say if the inputs were random, and the command's help must say that random inputs are the default."""
    one, other = scaled(tmp_path / "one.onnx", 1.0), scaled(tmp_path / "other.onnx", 2.0)
    in_int8 = replace(other, properties={**other.properties, "precision": "int8"})
    data = build.save_data(tmp_path / "d.npz", x=np.ones((3, 2), np.float32))
    advice = "; these were random inputs; pass data= with real samples"
    assert accel.verify(one, in_int8).problems[-1].endswith(advice)
    for found in (accel.verify(one, other), accel.verify(one, in_int8, data=data)):
        assert not found.passed
        assert "random" not in found.problems[-1]
        assert found.problems[0] in " ".join(found.table().split())
        assert found.problems[0] in repr(found)
        assert found._repr_html_().startswith("<pre>")
    Manifest(kind="onnx", signature=other.signature, files=other.hashes(), properties=in_int8.properties).write(
        manifest_path(other.path)
    )
    shown = " ".join(cli("verify", one.path, other.path).stdout.split())
    assert "on random inputs: output 'y'" in shown
    assert "pass --data with real samples" in shown
    assert "random inputs" not in cli("verify", one.path, other.path, "--data", data).stdout
    assert "Default: random inputs" in " ".join(cli("verify", "--help").stdout.split())


def divided(path: Path, *nodes: onnx.NodeProto) -> Artifact:
    shape, numbers = (build.INT64, ["n"]), {"by": 7, "by_float": np.float32(7), "more": np.float32(32)}
    return build.artifact(path, list(nodes), {"x": shape}, {"y": shape}, numbers)


def test_integers_without_floats_are_equal(cli: Any, tmp_path: Path) -> None:
    """Fails if verify accepts integers that another form of the model computes in float32, because they differ by less
    than the limit of rounding. Also fails if verify asks for equal integers where the reference rounds floats, or if a
    difference beyond 2^53 goes unnoticed."""
    to, back = build.node("Cast", "x", "f", to=build.FLOAT), build.node("Cast", "q", "y", to=build.INT64)
    exact = divided(tmp_path / "exact.onnx", build.node("Div", "x by", "y"))
    rounded = divided(tmp_path / "rounded.onnx", to, build.node("Div", "f by_float", "q"), back)
    other = divided(
        tmp_path / "other.onnx", to, build.node("Div", "f by_float", "p"), build.node("Sub", "p more", "q"), back
    )
    data = build.save_data(tmp_path / "d.npz", x=np.arange(1_999_999_991, 2_000_000_000))
    ran = cli("verify", exact.path, rounded.path, "--data", data)
    said = "output 'y': its integers differ by up to 13; the model computes these integers from integers alone"
    assert (ran.code, said in " ".join(ran.stdout.split())) == (1, True), ran.stdout
    assert accel.verify(exact, exact, data=data).passed
    found = accel.verify(rounded, other, data=data)
    assert found.passed
    assert found.outputs["y"].max_abs > 0
    assert difference("y", np.array([2**53 + 1]), np.array([2**53])).rel_l2 > 0


def test_two_different_signatures(cli: Any, digits: Artifact, minilm: Artifact) -> None:
    """Checks that verify refuses to compare two models that take different inputs."""
    ran = cli("verify", digits.path, minilm.path, "-q")
    assert ran.code == 2
    assert "give two versions of one model" in ran.stderr


SIGNATURE = Signature((TensorSpec.parse("x:float32[batch,n]"), TensorSpec.parse("ids:int64[batch]")))


@given(st.integers(1, 9), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 12)))
def test_batches_hold_every_sample_once(tmp_path_factory: Any, count: int, size: int, limit: int | None) -> None:
    """Fails if batching loses, repeats or reorders a sample, or gives more samples than the limit."""
    path = tmp_path_factory.mktemp("data") / "d.npz"
    np.savez(path, x=np.ones((count, 3), np.float32), ids=np.arange(count))
    found = [b["ids"] for b in Dataset.load(path, SIGNATURE).batches(size, limit)]
    assert all(len(ids) <= size for ids in found)
    np.testing.assert_array_equal(np.concatenate(found), np.arange(count)[:limit])


def test_shaped_samples_are_real_values(tmp_path: Path) -> None:
    """If a gate needs a larger shape than the data has, the gate must repeat values from the data. Fails if the gate
    invents values."""
    path = tmp_path / "d.npz"
    np.savez(path, x=np.arange(12, dtype=np.float32).reshape(3, 4), ids=np.arange(3))
    feeds = Dataset.load(path, SIGNATURE).shaped({"batch": 5, "n": 6}, 1)
    assert feeds["x"].shape == (5, 6)
    np.testing.assert_array_equal(feeds["ids"], [1, 2, 0, 1, 2])
    np.testing.assert_array_equal(feeds["x"][0], [4, 5, 6, 7, 4, 5])


def test_a_folder_of_parts(tmp_path: Path) -> None:
    """Checks that the files of a data folder may have different lengths, and that no file's labels are lost."""
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3), np.float32), ids=np.zeros(2, np.int64), y=np.array([1, 2]))
    np.savez(tmp_path / "b.npz", x=np.ones((1, 9), np.float32), ids=np.zeros(1, np.int64), y=np.array([3]))
    data = Dataset.load(tmp_path, SIGNATURE)
    assert len(data) == 3
    assert data.extra()["y"].tolist() == [1, 2, 3]
    (tmp_path / "c.npz").write_text("x")
    with pytest.raises(BadData, match=r"c\.npz"):
        Dataset.load(tmp_path, SIGNATURE)


@pytest.mark.proof
def test_a_range_that_nobody_declared_grows_with_the_data(cli: Any, tmp_path: Path) -> None:
    """Checks that verify refuses data outside the range that the user declares for a dim. If no range is declared,
    verify must accept data outside the default range."""
    node = onnx.helper.make_node("ReduceMean", ["x"], ["y"], keepdims=1)
    ends = [onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("x", ["batch", "length"]), ("y", [1, 1]))]
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:])
    path, data = tmp_path / "m.onnx", tmp_path / "d.npz"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), str(path))
    np.savez(data, x=np.ones((4, 300), np.float32))
    assert cli("verify", path, path, "--data", data).code == 0
    assert cli("optimize", path, "--target", "ort-cpu", "--precision", "fp32", "--data", data, "-o", tmp_path / "o",
               "--rounds", "5", "--fixed-session").code == 0  # fmt: skip
    ran = cli("verify", path, path, "--data", data, "--dim", "length=2:16:64")
    assert ran.code == 2
    assert "outside the range 2..64" in ran.stderr


WORDS = """
import torch

def words():
    torch.manual_seed(0)
    return torch.nn.EmbeddingBag(50, 4, mode="mean")
"""


def test_a_number_that_pytorch_has_no_row_for(tmp_path: Path, cli: Any) -> None:
    """Checks that an index outside PyTorch's embedding table gives an error that names the file and the index."""
    (tmp_path / "words.py").write_text(WORDS)
    made, data = tmp_path / "m.onnx", tmp_path / "b.npz"
    words = ["--input", "input:int64[batch,3]{0..49}", "-q"]
    assert cli("export", f"{tmp_path / 'words.py'}:words", *words, "-o", made).code == 0
    np.savez(data, input=np.array([[1, 2, 3], [4, -7, 5]]))
    ran = cli("verify", f"{tmp_path / 'words.py'}:words", made, "--data", data, *words)
    assert (ran.code, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
    assert re.search(
        r"b\.npz: 'input' holds -7, outside 0\.\.49, and the model fails on it \(.+\); correct it", ran.stderr
    )
