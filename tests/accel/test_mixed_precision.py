"""The search for the layers that have to stay float: planted ones are found, and only those."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpu_features import needs_vnni
from onnx import TensorProto, helper, numpy_helper

from accel.api.optimize import optimize
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.quantize import QuantizeConfig
from accel.converters.quantize_sensitivity import sensitivities
from accel.optimizer.judge import Judge
from accel.optimizer.mixed_precision import _halves, assign
from accel.optimizer.recipes import Request, recipes
from accel.sources.onnx_file import open_onnx
from accel.target import Target

LAYERS = 6
PLANTED = {"layer_1", "layer_4"}
WIDTH = 64


def planted(path: Path) -> Artifact:
    """The sum of six layers. In front of two of them one channel is three thousand times as large as the others, and
    its weights that much smaller: nothing to float32, and in eight bits nothing is left of the other channels."""
    rng = np.random.default_rng(0)
    nodes, constants, terms = [], {}, []
    for index in range(LAYERS):
        name = f"layer_{index}"
        scale = np.ones(WIDTH, np.float32)
        weights = (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32)
        if name in PLANTED:
            scale[3] = 3000
            weights[3] /= 3000
        constants |= {f"s{index}": scale, f"w{index}": weights}
        nodes.append(helper.make_node("Mul", ["x", f"s{index}"], [f"m{index}"], name=f"scale_{index}"))
        nodes.append(helper.make_node("MatMul", [f"m{index}", f"w{index}"], [f"l{index}"], name=name))
        nodes.append(helper.make_node("Tanh", [f"l{index}"], [f"t{index}"], name=f"tanh_{index}"))
        terms.append(f"t{index}")
    nodes.append(helper.make_node("Sum", terms, ["y"], name="sum"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(path))
    return open_onnx(path, probe=False)


def samples(path: Path, count: int = 64, **extra: np.ndarray) -> Path:
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {"x": rng.standard_normal((count, WIDTH)).astype(np.float32), **extra}
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def src(folder: Path) -> Artifact:
    return planted(folder / "m.onnx")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    needs_vnni()
    return samples(folder / "d.npz")


@pytest.mark.parametrize("form", ["ort-cpu", "tensorrt"])
def test_outlier_layers_are_the_most_sensitive(form: str, src: Artifact, data: Path) -> None:
    """Fails if a layer is blamed for what another one loses, or a layer isn't measured at all."""
    found = sensitivities(src, QuantizeConfig(form=form, data=data, samples=32))
    assert {row.node for row in found[:2]} == PLANTED
    assert {row.node for row in found} == {f"layer_{i}" for i in range(LAYERS)}
    assert found[1].error > 5 * found[2].error > 0


def mixed_row(result: Any) -> Any:
    return next(row for row in result.candidates if row.precision == "mixed")


def test_exactly_the_planted_layers_stay_float(src: Artifact, data: Path, tmp_path: Path) -> None:
    """Fails if all of int8 passes, if a layer too many stays float, if what was found isn't what is built, or if the
    report doesn't show what each layer loses and which of them stay."""
    result = optimize(
        src, out=tmp_path / "out", target="ort-cpu", precision="mixed", data=data, max_drop=0.005, rounds=5, threads=1
    )
    row = mixed_row(result)
    assert row.trajectory is not None
    assert set(row.trajectory.kept) == PLANTED
    assert row.trajectory.confirmed
    tries = row.trajectory.tries
    assert not tries[0].within  # with all of them in int8
    assert tries[0].kept == ()
    assert [one.judged_on for one in tries][-1] == "held out"
    assert tries[-1].within
    assert row.judgement.drop <= 0.005
    weights = {t.name: t.data_type for t in onnx.load(str(row.artifact.path)).graph.initializer}
    assert {name for name in weights if name in {f"w{i}" for i in range(LAYERS)}} == {"w1", "w4"}
    written = json.loads((tmp_path / "out" / "optimize.json").read_text())
    assert next(r for r in written["candidates"] if r["precision"] == "mixed")["mixed"]["kept"] == list(
        row.trajectory.kept
    )
    assert written["environment"]["threads"] == 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<h2>Sensitivity (") == 1
    shown = re.findall(
        r">(layer_\d)</td><td class=\"name\">MatMul</td><td class=\"name\">\S+</td><td[^>]*>(\w+)<", page
    )
    assert shown == [(x.node, "fp32" if x.node in PLANTED else "int8") for x in row.trajectory.layers]
    assert "2 of 6 layers stay fp32, confirmed" in page


def test_the_search_is_in_the_manifest(src: Artifact, data: Path, tmp_path: Path, cli: Any) -> None:
    """Fails if the command doesn't know the word, or the shipped file doesn't say how its layers were chosen and what
    the others compute in."""
    pytest.importorskip("tensorrt_rtx_bindings")
    done = cli(
        "optimize", src.path, "-o", tmp_path / "out", "--target", "tensorrt-rtx", "--precision", "mixed",
        "--data", data, "--max-drop", "0.005", "--compute-capability", "8.6",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "model.engine.manifest.json").read_text())
    found = manifest["session"]["mixed"]
    assert set(found["kept"]) == PLANTED
    assert found["base"] == "fp16"
    assert len(found["layers"]) == LAYERS
    assert [one["judged_on"] for one in found["tries"]].count("held out") >= 1
    quantize = next(stage for stage in manifest["stages"] if stage["name"] == "quantize")
    assert set(quantize["options"]["keep"]) == PLANTED


def candidates(src: Artifact, data: Path | None) -> Any:
    request = Request(targets=(Target.get("ort-cpu"),), precisions=("mixed",), data=data, samples=32, threads=1)
    return recipes(src, request)


def test_what_the_held_out_half_refutes_is_not_shipped(src: Artifact, tmp_path: Path) -> None:
    """Fails if the second half of the data isn't asked: there alone the input has values that nothing was calibrated
    for."""
    needs_vnni()
    x = np.random.default_rng(2).standard_normal((64, WIDTH)).astype(np.float32)
    x[40:, 0] = 2000.0
    np.savez(tmp_path / "d.npz", x=x)
    ((recipe,), _) = candidates(src, tmp_path / "d.npz")
    judge = Judge(src, tmp_path / "d.npz", None)
    made, found = assign(recipe, src, judge, 0.005, StageCache(tmp_path / "cache"))
    refuted = [one for one in found.tries if one.judged_on == "held out" and not one.within]
    assert set(refuted[0].kept) == PLANTED
    assert set(found.kept) > PLANTED
    assert found.tries[-1].within
    assert found.tries[-1].judged_on == "held out"
    quantize = [config for name, config, _ in made.stages if name == "quantize"]
    assert not quantize or set(quantize[0].keep) == set(found.kept)


def test_halves_keep_what_belongs_to_a_sample(src: Artifact, tmp_path: Path) -> None:
    """Fails if labels go to another half than their samples, or a metric over all samples is computed on half."""
    from contextlib import ExitStack

    def metric(outputs: Any, data: Any) -> float:
        assert len(outputs["y"]) == len(data["label"]) == 5
        return float(data["label"].sum())

    path = samples(tmp_path / "d.npz", 10, label=np.arange(10), names=np.array(3))
    with ExitStack() as stack:
        search, held_out = _halves(Judge(src, path, metric), stack)
        assert held_out is not None
        assert (search[1].reference_metric(), held_out[1].reference_metric()) == (10.0, 35.0)
        pairs = samples(tmp_path / "p.npz", 10, pair=np.zeros((4, 2), int))
        whole = Judge(src, pairs, metric)
        assert _halves(whole, stack) == (("all", whole), None)


def test_it_needs_data(src: Artifact) -> None:
    """Fails if layers are chosen on random inputs."""
    made, (left_out,) = candidates(src, None)
    assert not made
    assert "pass --data" in left_out.reason
