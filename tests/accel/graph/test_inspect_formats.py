"""Proves that accel inspect reports the inputs, outputs, weights, FLOPs and warnings of files of every format."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.artifact import Artifact, manifest_path
from accel.errors import BadSource, UnsupportedHere
from accel.graph.ncnn_param import read_net
from accel.graph.openvino_ir import read_ir

# The small net of make_models.py has one convolution. CONV is the convolution's FLOPs for one image. WEIGHTS is the
# net's number of weights. A batch norm has four weights per channel.
CONV, WEIGHTS = 2 * (8 * 8 * 4) * (3 * 3 * 3), 112 + 16 + 25
# KERNELS is the number of weights in the net's kernels. TFLite folds the batch norm, so a TFLite file has only the
# weights of the kernels.
KERNELS = 108 + 20


def looked_at(cli: Any, *words: Any) -> dict[str, Any]:
    ran = cli("inspect", *words, "--json", "-q")
    assert ran.code == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    ("own", "asked", "computed"),
    [("fp32", "bf16", "bf16"), ("fp32", "fp32", "fp32"), ("int8", "bf16", "int8+bf16"), ("int8", None, "int8")],
)
def test_the_precision_is_that_of_the_session(
    cli: Any, digits: Artifact, tmp_path: Path, own: str, asked: str | None, computed: str
) -> None:
    """Fails if inspect shows only the precision of the file, although the session that accel optimize chose computes
    float32 weights in bfloat16."""
    made = digits.copy_to(tmp_path / "model.onnx")
    assert made.manifest is not None
    options = {"threads": 1, **({"precision": asked} if asked else {})}
    session = {"runtime": "openvino", "options": options}
    manifest = replace(made.manifest, session=session, properties={**made.properties, "precision": own})
    manifest.write(manifest_path(made.path))
    assert looked_at(cli, made.path)["precision"] == computed
    said = " ".join(cli("inspect", made.path, "-q").stdout.split())
    assert f"precision {computed}" in said
    assert ("the file's weights: " in said) == (own != computed)
    assert f"runs in openvino, 1 thread{', precision bf16' if asked == 'bf16' else ''}" in said


# The fields that accel inspect reports for a file of any format.
SAID = {
    "nodes", "operators", "parameters", "weight_bytes", "flops", "flops_by_operator", "most_expensive", "dynamic_dims",
    "quantized_share", "sizes", "warnings",
}  # fmt: skip


def all_said(body: dict[str, Any]) -> None:
    """Checks that the report has every field and lists the most expensive nodes first, and that the FLOPs by operator
    add up to the total."""
    graph = body["graph"]
    assert set(graph) >= SAID
    assert body["signature"]["inputs"]
    assert body["signature"]["outputs"]
    assert body["bytes"] >= sum(graph["weight_bytes"].values()) > 0
    costs = [node["flops"] for node in graph["most_expensive"]]
    assert 1 <= len(costs) <= 10
    assert costs == sorted(costs, reverse=True)
    assert sum(graph["flops_by_operator"].values()) == graph["flops"] >= sum(costs) > 0


def test_an_onnx_file(cli: Any, digits: Artifact) -> None:
    """Fails if the report of an ONNX file lacks a field, such as the opset, in JSON or in the text."""
    body = looked_at(cli, digits.path)
    all_said(body)
    assert body["properties"]["opset"] == 20
    ran = cli("inspect", digits.path, "-q")
    said = ("opset 20", "in   image:", "out  logits:", "dim  batch", "parameters (float", " MB", "GFLOPs at batch=1: ")
    for words in (*said, "quantized products: 0%", "most expensive"):
        assert words in ran.stdout, words


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("sequential", "Conv2D"),
        ("sequential.keras", "Conv2D"),
        ("sequential.h5", "Conv2D"),
        ("float.tflite", "CONV_2D"),
        ("int8.tflite", "CONV_2D"),
    ],
)
def test_forms_of_one_net(cli: Any, tensorflow_models: Path, name: str, operator: str) -> None:
    """Fails if inspect reports wrong weights, FLOPs or operators, or a wrong share of int8 weights. The same net is
    inspected in each file format."""
    body = looked_at(cli, tensorflow_models / name)
    all_said(body)
    graph = body["graph"]
    assert body["signature"]["inputs"][0]["shape"] == ["batch", 8, 8, 3]
    assert body["bytes"] > 1000
    least = KERNELS if name.endswith("tflite") else WEIGHTS
    assert least <= graph["parameters"] <= WEIGHTS
    assert graph["operators"][operator] == 1
    assert graph["flops_by_operator"]["Conv"] == CONV
    assert graph["most_expensive"][0]["operator"] == "Conv"
    assert graph["dynamic_dims"] == ["batch"]
    assert graph["counted_as"] == "onnx"
    assert (graph["quantized_share"] > 0.9) == (name == "int8.tflite")
    assert graph["warnings"] == []


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "ends"), [("frozen.pb", ["logits"]), ("checkpoint/model.meta", ["logits", "MatMul_2"])]
)
def test_a_graph_whose_ends_nobody_named(cli: Any, tensorflow_models: Path, name: str, ends: list[str]) -> None:
    """Fails if inspect leaves out a node between the input and the output of a graph without a signature. Also fails if
    inspect counts the nodes that save and restore weights, or ignores --inputs and --outputs."""
    body = looked_at(cli, tensorflow_models / name)
    assert [spec["name"] for spec in body["signature"]["inputs"]] == ["x"]
    assert [spec["name"] for spec in body["signature"]["outputs"]] == ends
    assert body["graph"]["parameters"] == 6 * 4 + 4 * 2
    assert body["graph"]["flops"] >= 2 * (6 * 4 + 4 * 2)
    body = looked_at(cli, tensorflow_models / name, "--inputs", "x", "--outputs", "Relu")
    assert body["graph"]["parameters"] == 6 * 4


def test_dropout_left_in(cli: Any, tensorflow_models: Path) -> None:
    """Checks that inspect accepts a graph with dropout, and warns that the graph is random."""
    graph = looked_at(cli, tensorflow_models / "dropout.pb")["graph"]
    assert graph["parameters"] == 6 * 4 + 4 * 2
    assert "RandomUniform" in graph["warnings"][0]
    assert "--strip-training-ops" in graph["warnings"][0]
    ran = cli("inspect", tensorflow_models / "noise.pb")
    assert (ran.code, "random_normal" in ran.stderr) == (2, True)


def test_what_can_not_become_onnx(cli: Any, tensorflow_models: Path) -> None:
    """The model has an operator that ONNX lacks. Checks that inspect lists the operators, but doesn't count FLOPs and
    doesn't draw the model."""
    graph = looked_at(cli, tensorflow_models / "gelu_int8.tflite")["graph"]
    assert graph["operators"]["GELU"] == 1
    assert "flops" not in graph
    assert "GELU" in graph["warnings"][0]
    assert "warning: FLOPs aren't counted" in cli("inspect", tensorflow_models / "strings", "-q").stdout
    ran = cli("inspect", tensorflow_models / "strings", "--graph", tensorflow_models / "g.html", "-q")
    assert (ran.code, "can't be drawn" in ran.stderr) == (2, True)


def test_one_signature_of_several(cli: Any, tensorflow_models: Path) -> None:
    """Checks that inspect reports the signature that --signature names."""
    body = looked_at(cli, tensorflow_models / "two_signatures", "--signature", "square")
    assert [spec["name"] for spec in body["signature"]["outputs"]] == ["squared"]


@pytest.fixture(scope="module")
def plain(digits: Artifact) -> dict[str, Any]:
    return accel.inspect(digits, sizes={"batch": 3}).graph


def products(graph: dict[str, Any]) -> int:
    """Returns the total FLOPs of convolutions and matrix products. File formats have different names for these
    operators."""
    kinds = ("Conv", "Gemm", "MatMul", "InnerProduct")
    return sum(n for name, n in graph["flops_by_operator"].items() if name.startswith(kinds))


@pytest.mark.proof
@pytest.mark.parametrize("to", ["openvino", "ncnn", "torch"])
def test_ways_out_of_one_net(cli: Any, digits: Artifact, plain: dict[str, Any], tmp_path: Path, to: str) -> None:
    """Exports the digits net to other formats. Fails if inspect reports other weights or FLOPs for the exported files
    than for the ONNX file. Also fails if inspect needs the manifest, or if the graph lacks the inputs or outputs."""
    made = accel.export(digits.path, to=to, out=tmp_path / to)
    body = looked_at(cli, tmp_path / to, "--sizes", "batch=3", "--graph", tmp_path / "g.html")
    all_said(body)
    graph = body["graph"]
    assert graph["parameters"] == plain["parameters"]
    assert products(graph) == products(plain)
    assert graph["sizes"] == {"batch": 3}
    assert graph["quantized_share"] == 0
    assert graph["warnings"] == []
    page = (tmp_path / "g.html").read_text()
    assert graph["most_expensive"][0]["name"] in page
    if to == "torch":
        return
    read = read_ir if to == "openvino" else read_net
    foreign = read(made.path, made.signature, {"batch": 1})
    assert set(foreign.inputs) <= {name for op in foreign.operations for name in op.inputs}
    assert set(foreign.outputs) <= {name for op in foreign.operations for name in op.outputs}
    assert [spec.name for spec in foreign.outputs.values()] == ["logits"]
    (tmp_path / "bare").mkdir()
    for file in made.files:
        shutil.copy(file, tmp_path / "bare")
    bare = accel.inspect(tmp_path / "bare")
    assert bare.graph["parameters"] == plain["parameters"]
    if to == "openvino":
        assert str(bare.artifact.signature.inputs[0]) == "image:float32[batch,1,8,8]"
        assert bare.graph["flops"] > 0
    else:  # the file doesn't record the size of an image
        assert bare.artifact.signature.inputs[0].name == "in0"
        assert any("which shapes go in" in line for line in bare.graph["warnings"])


@pytest.mark.parametrize("name", ["m.param", "m.xml"])
@pytest.mark.parametrize("content", [b"", b"hello", bytes(range(256)) * 40, b"7767517\n1 1\nInput in0 x"])
def test_files_that_are_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    """Checks that a file that is neither an ncnn net nor an OpenVINO IR gives a one-line error."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(BadSource) as caught:
        accel.inspect(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_an_engine_is_not_drawn(digits: Artifact, tmp_path: Path) -> None:
    """Checks that inspect refuses to draw an engine, because an engine has kernels but no graph."""
    engine = Artifact(tmp_path / "model.engine", "engine", digits.signature)
    with pytest.raises(UnsupportedHere, match="give its ONNX file"):
        accel.inspect(engine, page=tmp_path / "g.html")


def test_netron(cli: Any, digits: Artifact, tensorflow_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that inspect suggests netron if netron is installed, and only then."""
    import importlib.util

    from accel.cli import inspect as command

    sources = (digits.path, tensorflow_models / "float.tflite")
    for there in (None, importlib.util.find_spec("json")):
        monkeypatch.setattr(command, "find_spec", lambda _, there=there: there)
        for source in sources:
            lines = [line for line in cli("inspect", source, "-q").stdout.splitlines() if "netron" in line]
            assert len(lines) == (0 if there is None else 1)
            assert all(f"netron {source}" in line for line in lines)
