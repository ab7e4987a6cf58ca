"""Proves that accel bisect names planted faults in few runs, even after a stage that renames all tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.api.bisect import bisect
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.graph.simplify import SimplifyConfig
from accel.converters.quantize.stage import QuantizeConfig
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.errors import UsageError
from accel.proof.bisect import most_runs
from accel.runtimes.onnx_rounded import RoundedModel
from accel.stage import run_stage
from tests.support.onnx_builder import FLOAT, artifact, node, save_data

LAYERS, WIDTH = 4, 16
Edit = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Makes four layers of masked attention with layer normalization. The mask adds -1e9."""
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {"one": np.float32(1), "low": np.float32(-1e9), "scale": np.float32(0.25)}
    nodes = [
        node("Cast", "mask", "m", to=FLOAT),
        node("Sub", "one m", "away"),
        node("Mul", "away low", "bias"),
    ]
    hidden = "x"
    for i in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            constants[f"{name}{i}.w"] = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4
        constants |= {f"n{i}.w": np.ones(WIDTH, np.float32), f"n{i}.b": np.zeros(WIDTH, np.float32)}
        nodes += [
            node("MatMul", f"{hidden} q{i}.w", f"q{i}"),
            node("MatMul", f"{hidden} k{i}.w", f"k{i}"),
            node("MatMul", f"{hidden} v{i}.w", f"v{i}"),
            node("Transpose", f"k{i}", f"kt{i}", perm=[0, 2, 1]),
            node("MatMul", f"q{i} kt{i}", f"s{i}"),
            node("Mul", f"s{i} scale", f"scaled{i}"),
            node("Add", f"scaled{i} bias", f"masked{i}"),
            node("Softmax", f"masked{i}", f"p{i}", axis=-1),
            node("MatMul", f"p{i} v{i}", f"c{i}"),
            node("MatMul", f"c{i} o{i}.w", f"a{i}"),
            node("Add", f"a{i} {hidden}", f"r{i}"),
            node("LayerNormalization", f"r{i} n{i}.w n{i}.b", f"h{i}", epsilon=1e-5),
        ]
        hidden = f"h{i}"
    nodes.append(node("Identity", hidden, "out"))
    return artifact(
        tmp_path_factory.mktemp("encoder") / "m.onnx",
        nodes,
        {"x": (FLOAT, ["batch", 6, WIDTH]), "mask": (TensorProto.INT64, ["batch", 1, 6])},
        {"out": (FLOAT, ["batch", 6, WIDTH])},
        constants,
    )


@pytest.fixture(scope="module")
def samples(encoder: Artifact) -> Path:
    rng = np.random.default_rng(1)
    mask = np.ones((12, 1, 6), np.int64)
    mask[:, :, 4:] = 0
    x = rng.standard_normal((12, 6, WIDTH)).astype(np.float32)
    return save_data(encoder.path.with_name("data.npz"), x=x, mask=mask)


def edited(src: Artifact, path: Path, edit: Edit) -> Path:
    model = onnx.load(str(src.path))
    edit(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return path


def flip(name: str, bit: int) -> Edit:
    """Flips one bit of one weight."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        value = numpy_helper.to_array(tensor).copy()
        value.view(np.uint32)[3, 5] ^= 1 << bit
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    return edit


def epsilon(model: onnx.ModelProto) -> None:
    found = next(n for n in model.graph.node if n.name == "n_h2")
    next(a for a in found.attribute if a.name == "epsilon").f = 1e-1


def clamp(model: onnx.ModelProto) -> None:
    """Raises the lowest value of a mask, so that the mask hides nothing."""
    tensor = next(t for t in model.graph.initializer if t.name == "low")
    tensor.CopyFrom(numpy_helper.from_array(np.float32(-1e-1), "low"))


def rename(model: onnx.ModelProto) -> None:
    """Renames every inner tensor and node, like another version of an exporter."""
    names = {n: f"t_{i}" for i, n in enumerate(x for node in model.graph.node for x in node.output) if n != "out"}
    for index, made in enumerate(model.graph.node):
        made.name = f"node_{index}"
        made.input[:] = [names.get(n, n) for n in made.input]
        made.output[:] = [names.get(n, n) for n in made.output]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(flip("v1.w", 29), "n_v1"), (flip("o3.w", 22), "n_a3"), (epsilon, "n_h2"), (clamp, "n_bias")],
    ids=["weight bit", "weight bit at the end", "epsilon", "mask"],
)
@pytest.mark.parametrize("renamed", [False, True], ids=["same names", "renamed"])
def test_a_planted_fault_is_found_by_name(
    encoder: Artifact, samples: Path, tmp_path: Path, fault: Edit, expected: str, renamed: bool
) -> None:
    """Checks that bisect names the faulty node, and that the inputs of this node agree in both models. Also fails if
    the number of runs grows faster than the logarithm of the number of nodes. With ``renamed``, the faulty model has
    other names for all inner tensors."""

    def edit(model: onnx.ModelProto) -> None:
        fault(model)
        if renamed:
            rename(model)

    candidate = edited(encoder, tmp_path / "bad.onnx", edit)
    found = bisect(encoder.path, candidate, data=samples)
    assert found.divergence is not None
    assert found.divergence.node.name == expected
    assert all(d.rel_l2 <= found.limit for d in found.divergence.inputs.values())
    assert found.divergence.numbers.rel_l2 > found.limit
    assert found.runs <= most_runs(found.tensors)
    assert found.by_structure == (found.tensors - 1 if renamed else 0)


def test_only_what_crosses_a_cut_is_held(
    encoder: Artifact, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run returns tensors that don't cross the chosen cut of the graph. At most five of the 52 tensors cross
    a cut: a layer's input, query, key and value, and the mask."""
    held: list[int] = []
    plain = RoundedModel.run

    def run(self: RoundedModel, *words: Any) -> dict[str, np.ndarray]:
        found = plain(self, *words)
        held.append(len(found))
        return found

    monkeypatch.setattr(RoundedModel, "run", run)
    candidate = edited(encoder, tmp_path / "bad.onnx", flip("v1.w", 29))
    found = bisect(encoder.path, candidate, data=samples)
    assert found.divergence is not None
    assert found.tensors == 12 * LAYERS + 4
    assert max(held) <= 5


def test_one_lowest_bit(encoder: Artifact, samples: Path, tmp_path: Path) -> None:
    """Fails if a limit of 0 misses a difference of one unit in the last place, or if the default limit reports this
    difference."""
    candidate = edited(encoder, tmp_path / "bit.onnx", flip("q2.w", 0))
    assert bisect(encoder.path, candidate, data=samples).divergence is None
    found = bisect(encoder.path, candidate, data=samples, limit=0.0, scan=True)
    assert found.divergence is not None
    assert found.divergence.node.name == "n_q2"
    assert found.earlier == ()


def test_a_model_against_itself(encoder: Artifact, samples: Path) -> None:
    """Fails if bisect finds a difference, even in the last bit, between a model and itself."""
    found = bisect(encoder.path, encoder.path, data=samples, limit=0.0, scan=True)
    assert found.divergence is None
    assert found.harmless == ()
    assert found.tensors == 12 * LAYERS + 4


def test_what_heals_is_not_the_cause(tmp_path: Path) -> None:
    """A Relu removes the first of two differences. Checks that bisect reports the removed difference as harmless, and
    names the cause of the second difference."""

    def build(path: Path, low: float, factor: float) -> Artifact:
        return artifact(
            path,
            [
                node("Abs", "x", "a"),
                node("Mul", "a low", "negative"),
                node("Sqrt", "a", "c"),
                node("Mul", "c factor", "d"),
                node("Tanh", "d", "t"),
                node("Relu", "negative", "nothing"),  # this node near the end removes the first difference
                node("Add", "t nothing", "y"),
            ],
            {"x": (FLOAT, ["batch", 4])},
            {"y": (FLOAT, ["batch", 4])},
            {"low": np.float32(low), "factor": np.float32(factor)},
        )

    good, bad = build(tmp_path / "a.onnx", -1.0, 1.0), build(tmp_path / "b.onnx", -7.0, 1.5)
    found = bisect(good, bad, scan=True)
    assert found.divergence is not None
    assert found.divergence.node.name == "n_d"
    assert found.harmless == ("negative",)
    assert found.earlier == ()
    same = bisect(good, build(tmp_path / "c.onnx", -7.0, 1.0), scan=True)
    assert same.divergence is None
    assert same.harmless == ("negative",)


def test_through_simplify_and_quantize(encoder: Artifact, samples: Path, tmp_path: Path) -> None:
    """Fails if bisect finds a difference in a correctly simplified or quantized model. If a scale in the quantized
    model is wrong, bisect must name the matrix product with the wrong scale."""
    made = run_stage("simplify", encoder, SimplifyConfig())
    assert bisect(encoder, made, data=samples).divergence is None
    quantized = run_stage("quantize", made, QuantizeConfig(form="tensorrt", data=samples, smooth=0.0))
    assert bisect(encoder, quantized, data=samples).divergence is None

    def spoil(model: onnx.ModelProto) -> None:
        reads = {n.output[0]: n for n in model.graph.node}
        product = next(n for n in model.graph.node if n.name == "n_k1")
        scale = next(t for t in model.graph.initializer if t.name == reads[product.input[1]].input[1])
        scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(3), scale.name))

    found = bisect(encoder, edited(quantized, tmp_path / "bad.onnx", spoil), data=samples)
    assert found.divergence is not None
    assert found.divergence.node.name == "n_k1"
    assert {"QuantizeLinear", "DequantizeLinear"} <= {n.operator for n in found.divergence.candidate_between}


def test_a_mask_is_a_mask_in_half_precision(encoder: Artifact, samples: Path) -> None:
    """A cast turns a mask's -1e9 into float16's lowest number. Fails if bisect counts the changed mask value as a
    difference."""
    from accel.converters.cast.stage import CastConfig

    made = run_stage("cast", encoder, CastConfig(precision="fp16", data=samples))
    assert bisect(encoder, made, data=samples).divergence is None


def test_the_torch_module_is_named(cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that the stages keep the name of the torch module that the exporter records for each node. Also checks
    that bisect names the faulty node's torch module."""

    def spoil(model: onnx.ModelProto) -> None:
        convolution = [n for n in model.graph.node if n.op_type == "Conv"][2]
        tensor = next(t for t in model.graph.initializer if t.name == convolution.input[1])
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))

    bad = edited(digits, tmp_path / "bad.onnx", spoil)
    ran = cli("bisect", digits.path, bad, "--data", digits_data[0], "--json")
    assert ran.code == 1, ran.stderr
    body = json.loads(ran.stdout)
    # The third convolution is child 7 of the net. The exporter folds the batch norm (child 8) into child 7, and may
    # record the path of either child.
    assert body["divergence"]["node"]["module"] in ("7", "8")
    assert body["divergence"]["node"]["operator"] == "Conv"
    shown = cli("bisect", digits.path, bad, "--data", digits_data[0])
    assert shown.code == 1
    assert "first difference" in shown.stdout
    assert cli("bisect", digits.path, digits.path).code == 0


def test_what_bisect_refuses(cli: Any, encoder: Artifact, digits: Artifact, tmp_path: Path) -> None:
    """Fails if bisect compares two different models, or refuses them with a traceback."""
    with pytest.raises(UsageError, match="the two models have different inputs"):
        bisect(encoder, digits)
    model = onnx.load(str(digits.path))
    model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = 1
    onnx.save(model, str(tmp_path / "ranks.onnx"))
    other = replace(digits.signature.inputs[0], shape=(*digits.signature.inputs[0].shape, 1))
    ranks = replace(digits, path=tmp_path / "ranks.onnx", signature=replace(digits.signature, inputs=(other,)))
    with pytest.raises(UsageError, match="has 4 dims in one model and 5 dims in the other model"):
        bisect(digits, ranks)
    ran = cli("bisect", digits.path, tmp_path / "none.onnx")
    assert ran.code == 2
    assert "does not exist" in ran.stderr
    assert "Traceback" not in ran.stderr


def scaled(path: Path, shape: list[Any], factor: Any) -> Artifact:
    spec = (FLOAT, shape)
    return artifact(path, [node("Mul", "x k", "y")], {"x": spec}, {"y": spec}, {"k": np.asarray(factor, np.float32)})


def test_models_of_other_widths(cli: Any, tmp_path: Path) -> None:
    """Fails if two models that take other sizes end in an internal error, or if a model with a fixed size isn't
    compared with its dynamic form."""
    eight = scaled(tmp_path / "8.onnx", ["batch", 8], 2.0)
    nine = scaled(tmp_path / "9.onnx", ["batch", 9], 2.0)
    free = scaled(tmp_path / "free.onnx", ["batch", "n"], 3.0)
    other = scaled(tmp_path / "other.onnx", ["batch", "n"], np.arange(9))
    ran = cli("bisect", eight.path, nine.path, "-q")
    assert ran.code == 2
    assert "x:float32[batch,8] and x:float32[batch,9]; give two versions of one model" in ran.stderr
    found = bisect(free, eight).divergence
    assert found is not None
    assert found.tensor == "y"
    ran = cli("bisect", free.path, other.path, "-q")
    assert ran.code
    assert "the candidate fails on the inputs x [8, " in ran.stderr
    assert "should not have happened" not in ran.stderr


def test_an_engine_stands_for_its_graph(cli: Any, encoder: Artifact, tmp_path: Path) -> None:
    """Checks that bisect uses and names the ONNX file that an IR was converted from."""
    pytest.importorskip("openvino")
    graph = tmp_path / "graph.onnx"
    cache = StageCache(tmp_path / "cache")
    made = run_stage("simplify", encoder, SimplifyConfig(), out=graph, cache=cache)
    ir = run_stage("openvino_from_onnx", made, OpenVinoFromOnnxConfig(), out=tmp_path / "m.xml", cache=cache)
    found = bisect(encoder, ir)
    assert found.divergence is None
    assert str(graph) in found.notes[0]
    shown = cli("bisect", encoder.path, ir.path)
    assert shown.code == 0
    assert "graph.onnx, from which it was made" in " ".join(shown.stdout.split())
    graph.write_bytes(encoder.path.read_bytes())
    ran = cli("bisect", encoder.path, ir.path)
    assert ran.code == 2, ran.stdout


def test_an_int8_file_has_the_limit_of_int8(tmp_path: Path) -> None:
    """Fails if an int8 IR that differs a little from its ONNX file is blamed by the limit of the fp32 session that its
    manifest records. A runtime may round an int8 model otherwise."""
    pytest.importorskip("openvino")
    weight = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    shapes = {"x": (FLOAT, ["batch", 16])}, {"y": (FLOAT, ["batch", 8])}
    graph = artifact(tmp_path / "m.onnx", [node("MatMul", "x w", "y")], *shapes, {"w": weight})
    config = OpenVinoFromOnnxConfig()
    ir = run_stage("openvino_from_onnx", graph, config, out=tmp_path / "m.xml", cache=StageCache(tmp_path / "cache"))
    weights = ir.path.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes().replace(weight.tobytes(), (1.05 * weight).astype(np.float32).tobytes()))
    assert ir.manifest is not None
    session = {"runtime": "openvino", "options": {"precision": "fp32"}}
    for precision, blamed in (("fp32", True), ("int8", False)):
        properties = {**ir.properties, "precision": precision}
        manifest = replace(ir.manifest, properties=properties, session=session)
        found = bisect(graph, ir.with_manifest(manifest))
        assert (found.as_run is not None) is blamed


def test_what_a_runtime_computes_is_not_passed_over(cli: Any, tmp_path: Path) -> None:
    """An IR with changed weights no longer matches the ONNX file that it was converted from. Checks that bisect also
    runs the IR itself, and reports that the outputs differ."""
    pytest.importorskip("openvino")
    weight = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    shapes = {"x": (FLOAT, ["batch", 16])}, {"y": (FLOAT, ["batch", 8])}
    graph = artifact(tmp_path / "m.onnx", [node("MatMul", "x w", "y")], *shapes, {"w": weight})
    config = OpenVinoFromOnnxConfig()
    ir = run_stage("openvino_from_onnx", graph, config, out=tmp_path / "m.xml", cache=StageCache(tmp_path / "cache"))
    assert bisect(graph, ir).as_run is None
    assert cli("bisect", graph.path, ir.path).code == 0
    weights = ir.path.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes().replace(weight.tobytes(), (2 * weight).tobytes()))
    found = bisect(graph, ir)
    assert found.divergence is None
    assert found.as_run is not None
    assert found.as_run.rel_l2 == pytest.approx(1.0)
    shown = cli("bisect", graph.path, ir.path)
    said = " ".join(shown.stdout.split())
    assert shown.code == 1
    assert "the ONNX forms agree" in said
    assert "its own runtime computes something else: y is off by 1 (rel_l2)" in said


def test_nodes_of_the_older_exporter() -> None:
    """Checks that the module path is read from a node's name if the node has no metadata."""
    from accel.proof.tensor_match import module_path

    old = helper.make_node("MatMul", ["a", "b"], ["c"], name="/encoder/layer.0/attention/MatMul")
    assert module_path(old) == "encoder.layer.0.attention"
    assert module_path(helper.make_node("MatMul", ["a", "b"], ["c"], name="plain")) == ""


def test_it_says_how_much_was_looked_at(cli: Any, tmp_path: Path) -> None:
    """Fails if bisect says that inner tensors agree although bisect compared only the outputs. With --scan, bisect
    finds the inner tensor that differs."""

    def build(path: Path, factor: float) -> Path:
        return artifact(
            path,
            [
                node("Abs", "x", "a"),
                node("Mul", "a factor", "negative"),
                node("Relu", "negative", "nothing"),
                node("Add", "a nothing", "y"),
            ],
            {"x": (FLOAT, ["batch", 4])},
            {"y": (FLOAT, ["batch", 4])},
            {"factor": np.float32(factor)},
        ).path

    one, other = build(tmp_path / "a.onnx", -1.0), build(tmp_path / "b.onnx", -2.0)
    quick = cli("bisect", one, other)
    assert quick.code == 0
    assert "1 run, limit" in quick.stdout
    assert "nothing else was looked at; --scan looks at every tensor" in quick.stdout
    scanned = cli("bisect", one, other, "--scan")
    assert scanned.code == 0
    assert "differ without consequence: negative" in scanned.stdout
    assert "nothing else was looked at" not in scanned.stdout
    assert "so does every tensor before them" in cli("bisect", one, one, "--scan").stdout
