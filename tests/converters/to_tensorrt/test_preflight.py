"""Proves that `accel preflight` lists each node that an engine build refuses, and rewrites nodes where this is safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from accel.api.preflight import preflight
from accel.artifact import Artifact
from accel.converters.quantize.stage import QuantizeConfig
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, EngineNotBuilt, engine_from_onnx
from accel.converters.to_tensorrt.preflight import preflight as look
from accel.converters.to_tensorrt.requirements import check_onnx
from accel.errors import GateFailed, NothingPassed, UnknownName, UnsupportedHere
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage
from tests.support.onnx_builder import FLOAT, artifact, node, run

RNG = np.random.default_rng(0)


def foreign(path: Path, zero: int = 128) -> Artifact:
    """Makes an int8 model as other toolkits write it, with uint8 activations, uint8 weights and a quantized bias."""
    weight = RNG.integers(0, 256, (8, 8)).astype(np.uint8)
    return artifact(
        path,
        [
            node("QuantizeLinear", "x xs xz", "xq"),
            node("DequantizeLinear", "xq xs xz", "xd"),
            node("DequantizeLinear", "w ws wz", "wd"),
            node("DequantizeLinear", "b bs", "bd"),
            node("MatMul", "xd wd", "p"),
            node("Add", "p bd", "s"),
            node("Relu", "s", "y"),
        ],
        {"x": (FLOAT, ["batch", 8])},
        {"y": (FLOAT, ["batch", 8])},
        {
            "xs": np.float32(0.02),
            "xz": np.uint8(zero),
            "w": weight,
            "ws": np.float32(0.002),
            "wz": np.uint8(zero),
            "b": RNG.integers(-5000, 5000, 8).astype(np.int32),
            # Runtimes assume that the bias's scale is the activations' scale times the weights' scale.
            "bs": np.float32(0.02 * 0.002),
        },
    )


def test_every_refused_node_is_listed(cli: Any, tmp_path: Path) -> None:
    """Checks that preflight lists all four nodes that TensorRT refuses. Also checks that each listed node has a cause,
    a fix, and a flag that says whether the rewrite is safe."""
    src = foreign(tmp_path / "m.onnx")
    ran = cli("preflight", src.path, "--json")
    assert ran.code == 1, ran.stderr
    body = json.loads(ran.stdout)
    assert {r["node"]: r["safe"] for r in body["refusals"]} == {"n_xq": True, "n_xd": True, "n_wd": True, "n_bd": True}
    assert all(r["cause"] and r["fix"] for r in body["refusals"])
    assert body["asked_parser"] is True
    shown = cli("preflight", src.path)
    assert shown.code == 1
    assert "n_bd" in shown.stdout


def test_the_build_says_all_of_it_at_once(tmp_path: Path) -> None:
    """Fails if the build's error names only the first refused node."""
    src = foreign(tmp_path / "m.onnx")
    with pytest.raises(EngineNotBuilt) as caught:
        engine_from_onnx(src, EngineFromOnnxConfig(), tmp_path / "m.engine")
    assert all(name in str(caught.value) for name in ("n_xq", "n_xd", "n_wd", "n_bd"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zero", [128, 113, 0])
def test_what_is_mended_builds_and_computes_the_same(cli: Any, tmp_path: Path, zero: int) -> None:
    """Checks that the rewritten model is accepted, builds, and keeps its outputs. With zero point 128, the outputs have
    to be bit-identical. With zero point 113 or 0, the rewritten scale is coarser, and the outputs may differ by up to
    10%."""
    src = foreign(tmp_path / "m.onnx", zero)
    ran = cli("preflight", src.path, "--fix", "-o", tmp_path / "fixed.onnx", "--json")
    assert ran.code == 0, ran.stderr
    fixed = open_onnx(tmp_path / "fixed.onnx")
    assert fixed.history[-1]["name"] == "fit_tensorrt"
    assert fixed.history[-1]["gates"]
    assert fixed.history[-1]["notes"] == {"biases": 1, "weights": 1, "activations": 1}
    x = RNG.standard_normal((32, 8)).astype(np.float32)
    before, after = run(src, x=x)["y"], run(fixed, x=x)["y"]
    if zero == 128:
        assert np.array_equal(before, after)
    else:
        assert np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)
    made = engine_from_onnx(fixed, EngineFromOnnxConfig(compute_capabilities=("8.6",)), tmp_path / "m.engine")
    assert made.properties["precision"] == "int8"


def test_a_model_quantized_for_the_cpu(digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that preflight lists the QDQ nodes that ONNX Runtime wrote into a real net, and that the rewritten net
    builds."""
    made = run_stage("quantize", digits, QuantizeConfig(form="ort-cpu", data=digits_data[0]))
    found = preflight(made, fix=True, out=tmp_path / "fixed.onnx", data=digits_data[0])
    assert any("uint8" in r.cause for r in found.refusals)
    assert found.passed
    assert found.fixed is not None
    engine_from_onnx(found.fixed, EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_optimize_mends_it_too(tmp_path: Path) -> None:
    """Checks that `accel.optimize` can build an engine from a model that another toolkit quantized."""
    import accel

    src = foreign(tmp_path / "m.onnx")
    result = accel.optimize(src.path, out=tmp_path / "out", target="tensorrt-rtx", compute_capabilities=["8.6"])
    assert result.chosen == "tensorrt-rtx int8"
    assert [r["name"] for r in result.artifact.history][-2:] == ["fit_tensorrt", "engine_from_onnx"]


def test_a_fix_that_changes_the_model_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Fails if accel writes a rewritten model that fails the gate. The rewrite in this test makes the scales ten times
    too large."""
    from accel.converters.to_tensorrt import fit as fit_tensorrt

    right = fit_tensorrt._Scale.symmetric
    monkeypatch.setattr(fit_tensorrt._Scale, "symmetric", lambda self: right(self) * np.float32(10))
    with pytest.raises(GateFailed):
        preflight(foreign(tmp_path / "m.onnx", 100), fix=True, out=tmp_path / "fixed.onnx")
    assert not (tmp_path / "fixed.onnx").exists()


def test_the_way_on_where_int8_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Checks the error for a rewritten model that fails the gate. The error must name the rewritten nodes and advise
    quantizing the float model again."""
    from accel.converters.to_tensorrt import fit as fit_tensorrt

    right = fit_tensorrt._Scale.symmetric
    monkeypatch.setattr(fit_tensorrt._Scale, "symmetric", lambda self: right(self) * np.float32(10))
    with pytest.raises(GateFailed, match=r"rewritten nodes are .*n_xq.*: quantize the float model again") as caught:
        preflight(foreign(tmp_path / "m.onnx", 100), fix=True, out=tmp_path / "fixed.onnx")
    assert caught.value.value is not None
    assert caught.value.value > 0.1


def test_a_file_that_only_a_gpu_can_run(cli: Any, tmp_path: Path) -> None:
    """Fails if preflight or ``accel bench`` refuses a valid model because ONNX Runtime has no CPU kernel for the
    model's types."""
    cast = node("Cast", "x", "b", to=TensorProto.BFLOAT16)
    nodes = [cast, node("MatMul", "b b", "p"), node("Cast", "p", "y", to=FLOAT)]
    artifact(tmp_path / "b.onnx", nodes, {"x": (FLOAT, [3, 3])}, {"y": (FLOAT, [3, 3])})
    found = preflight(tmp_path / "b.onnx", compute_capabilities=["7.5"])
    assert "n_p" in [refusal.node for refusal in found.refusals]
    assert preflight(tmp_path / "b.onnx", compute_capabilities=["8.6"]).refusals == ()
    ran = cli("bench", str(tmp_path / "b.onnx"))
    assert ran.code == 0, ran.stderr
    assert "onnx-rounded" in ran.stdout


def test_types_that_a_gpu_does_not_have(tmp_path: Path) -> None:
    """Checks that preflight refuses bfloat16 for compute capability 7.5 and float8 for 8.6, and accepts both types for
    newer GPUs."""
    low = artifact(
        tmp_path / "b.onnx",
        [node("Relu", "x", "y")],
        {"x": (TensorProto.BFLOAT16, [4])},
        {"y": (TensorProto.BFLOAT16, [4])},
    )
    assert [r.cause for r in look(low.path, ["8.6", "7.5"])] == ["compute capability 7.5 has no bfloat16"]
    assert look(low.path, ["8.0"]) == []
    eight = artifact(
        tmp_path / "f8.onnx",
        [node("Cast", "x", "q", to=TensorProto.FLOAT8E4M3FN), node("Cast", "q", "y", to=FLOAT)],
        {"x": (FLOAT, [4])},
        {"y": (FLOAT, [4])},
    )
    assert {r.node for r in look(eight.path, ["8.6"])} == {"n_q", "n_y"}
    assert look(eight.path, ["8.9"]) == []


def test_types_that_tensorrt_does_not_have(tmp_path: Path) -> None:
    """Checks that preflight accepts exactly the types that the parser of TensorRT-RTX 1.7 supports. A uint8 input is
    accepted only if the node that reads the input is a Cast."""
    refused = {"INT16", "UINT16", "UINT32", "UINT64", "DOUBLE"}
    for kind in (*refused, "UINT8", "INT8", "INT32", "INT64", "BOOL", "FLOAT16"):
        for cast_first in (True, False):
            late = [node("Transpose", "x", "t"), node("Cast", "t", "y", to=FLOAT)]
            early = [node("Cast", "x", "t", to=FLOAT), node("Transpose", "t", "y")]
            src = artifact(
                tmp_path / f"{kind}{cast_first}.onnx",
                early if cast_first else late,
                {"x": (getattr(TensorProto, kind), [2, 4])},
                {"y": (FLOAT, [4, 2])},
            )
            found = look(src.path)
            assert bool(found) == (kind in refused or (kind == "UINT8" and not cast_first)), (kind, found)
    (double,) = look(tmp_path / "DOUBLETrue.onnx")
    assert (double.node, double.operator, double.cause) == ("x", "input", "TensorRT reads float64 as float32")
    with pytest.raises(EngineNotBuilt, match=r"'n_t' \(Cast\): TensorRT has no int16; cast"):
        engine_from_onnx(open_onnx(tmp_path / "INT16True.onnx"), EngineFromOnnxConfig(), tmp_path / "m.engine")


def test_a_chain_that_the_parser_has_no_stack_for(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a chain of nodes that overflows the parser's stack is refused before the parser runs. Also checks
    that the error names the chain's last node, the cause and the fix. A graph with the same number of nodes in shorter
    chains has to be accepted."""
    monkeypatch.setattr("accel.converters.to_tensorrt.preflight.LONGEST_CHAIN", 4)

    def chained(sources: list[str]) -> Path:
        nodes = [node("Sigmoid", source, f"t{i}") for i, source in enumerate(sources)]
        ends = {f"t{i}": (FLOAT, ["batch", 4]) for i in range(len(sources)) if f"t{i}" not in sources}
        return artifact(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["batch", 4])}, ends).path

    assert look(chained(["x", "t0", "t1", "x", "t3", "t4"])) == [], "two chains of three"
    assert look(chained(["x", "t0", "t1", "t2"])) == []
    path = chained(["x", "t0", "t1", "t2", "t3"])
    (found,) = look(path)
    assert (found.node, found.fix, found.safe) == ("n_t4", "split it", False)
    assert "chain of 5 nodes, too long for the parser's stack" in found.cause
    assert cli("preflight", path).code == 1
    with pytest.raises(EngineNotBuilt, match=r"'n_t4' \(Sigmoid\): it ends a chain of 5 nodes, .* stack; split it"):
        check_onnx(path, onnx.load(str(path)))  # an engine build calls check_onnx before TensorRT's parser


def test_operators_are_asked_of_the_parser(tmp_path: Path) -> None:
    """Checks that preflight lists an operator that the toolkit's parser can't import."""
    src = artifact(
        tmp_path / "m.onnx",
        [node("Det", "x", "d"), node("Relu", "d", "y")],
        {"x": (FLOAT, ["batch", 3, 3])},
        {"y": (FLOAT, ["batch"])},
    )
    found = preflight(src)
    assert [(r.node, r.operator, r.safe) for r in found.refusals] == [("n_d", "Det", False)]
    assert not found.passed


def test_usage(cli: Any, digits: Artifact, tmp_path: Path) -> None:
    """Checks that the error for a wrong request names the fix. Also checks that preflight accepts a valid model, and
    refuses a GPU that the build refuses."""
    assert cli("preflight", digits.path).code == 0
    assert "name the file with -o" in cli("preflight", digits.path, "--fix").stderr
    assert "has to end in .onnx" in cli("preflight", digits.path, "--fix", "-o", tmp_path / "x.engine").stderr
    assert "major.minor" in cli("preflight", digits.path, "--compute-capability", "86").stderr
    hopper = cli("preflight", digits.path, "--compute-capability", "9.0")  # TensorRT-RTX doesn't support Hopper GPUs
    assert (hopper.code, hopper.stdout) == (2, "")
    assert "tensorrt-rtx can't build for compute capability 9.0; use one of the capabilities 7.5" in hopper.stderr
    assert "--target tensorrt on a machine with that GPU" in hopper.stderr
    with pytest.raises(UnknownName, match="unknown toolkit"):
        preflight(digits, target="openvino")
    onnx.save(onnx.load(str(digits.path)), str(tmp_path / "plain.onnx"))  # this model has no manifest
    assert cli("preflight", tmp_path / "plain.onnx").code == 0


def test_the_kernel_table_can_be_read(cli: Any, digits: Artifact, tmp_path: Path) -> None:
    """Checks that the kernel table contains every ONNX node of the engine, and that the kernel counts add up."""
    from accel.converters.to_tensorrt.kernel_table import fusions

    made = run_stage("engine_from_onnx", digits, EngineFromOnnxConfig(compute_capabilities=("8.6",)))
    body = json.loads(cli("inspect", made.path, "--json").stdout)
    found = fusions(body["kernels"])
    assert len(found["fused"]) + len(found["alone"]) + len(found["added"]) == len(body["kernels"])
    assert found["fused"], "a Conv and its Relu are one kernel"
    shown = cli("inspect", made.path).stdout
    unfolded = "".join(character for character in shown if character not in "│ \n")
    for row in body["kernels"]:
        assert ",".join(row["onnx"]) in unfolded
    assert f"{len(body['kernels'])} kernels: {len(found['fused'])} fused" in shown


def in_float64(path: Path, shift: float) -> Artifact:
    """Makes a model that computes (x + shift) - shift in float64. Float32 gives the same result only for a small
    shift."""
    return artifact(
        path,
        [
            node("Cast", "x", "d", to=TensorProto.DOUBLE),
            node("Add", "d shift", "a"),
            node("Sub", "a shift", "b"),
            node("Cast", "b", "f", to=FLOAT),
            node("MatMul", "f w", "y"),
        ],
        {"x": (FLOAT, ["batch", 8])},
        {"y": (FLOAT, ["batch", 4])},
        {"shift": np.float64(shift), "w": RNG.standard_normal((8, 4)).astype(np.float32)},
    )


def test_float64_inside_is_computed_in_float32_where_that_is_right(cli: Any, tmp_path: Path) -> None:
    """Checks that preflight lists each float64 node. If float32 is accurate enough for a graph, ``preflight --fix`` has
    to rewrite the graph, and ``accel.optimize`` has to build an engine from it. Also fails if a float32 engine passes
    the gate although the engine's outputs differ from the float64 graph's outputs."""
    import accel

    mild = in_float64(tmp_path / "mild.onnx", 2.0)
    found = look(mild.path)
    assert [(r.node, r.safe) for r in found] == [("n_d", True), ("n_a", True), ("n_b", True)], found
    ran = cli("preflight", mild.path, "--fix", "-o", tmp_path / "fixed.onnx", "--json")
    assert ran.code == 0, ran.stderr
    x = RNG.standard_normal((4, 8)).astype(np.float32)
    assert np.allclose(run(open_onnx(tmp_path / "fixed.onnx"), x=x)["y"], run(mild, x=x)["y"], atol=1e-5)
    wanted: dict[str, Any] = {"target": "tensorrt-rtx", "compute_capabilities": ["8.6"], "precision": "fp32"}
    made = accel.optimize(mild.path, out=tmp_path / "mild", **wanted)
    assert "fit_tensorrt" in [record["name"] for record in made.artifact.history]
    assert made.chosen == "tensorrt-rtx fp32"
    wild = in_float64(tmp_path / "wild.onnx", 1e9)
    with pytest.raises(NothingPassed, match="stage fit_tensorrt changed the output 'y'"):
        accel.optimize(wild.path, out=tmp_path / "wild", **wanted)


def test_float64_inside_a_local_function_is_rewritten_too(cli: Any, tmp_path: Path) -> None:
    """Fails if --fix leaves float64 in a local function of the model."""
    path = tmp_path / "function.onnx"
    model = onnx.load(in_float64(path, 2.0).path)
    inside = list(model.graph.node)[:-1]
    constant = helper.make_node("Constant", [], ["shift"], value=model.graph.initializer[0])
    opsets = list(model.opset_import)
    model.functions.append(helper.make_function("here", "There", ["x"], ["f"], [constant, *inside], opsets))
    model.opset_import.append(helper.make_opsetid("here", 1))
    product = model.graph.node[-1]
    del model.graph.node[:], model.graph.initializer[0]
    model.graph.node.extend([helper.make_node("There", ["x"], ["f"], domain="here"), product])
    onnx.save(model, str(path))
    assert {r.cause for r in look(path)} == {"TensorRT silently computes float64 in float32"}
    ran = cli("preflight", path, "--fix", "-o", tmp_path / "fixed.onnx", "--json")
    assert ran.code == 0, ran.stderr
    assert not look(tmp_path / "fixed.onnx")
    x = RNG.standard_normal((4, 8)).astype(np.float32)
    assert np.allclose(run(open_onnx(tmp_path / "fixed.onnx"), x=x)["y"], run(open_onnx(path), x=x)["y"], atol=1e-5)


def test_fix_asks_as_much_of_float32_as_optimize_does(cli: Any, tmp_path: Path) -> None:
    """Fails if --fix accepts a float32 rewrite with an error of 2%, although ``accel.optimize`` refuses the same
    rewrite. Also checks that --fix and ``accel.optimize`` advise changing the model so that float32 is accurate enough.
    The error of ``accel.optimize`` must not suggest --max-drop."""
    import accel

    lossy = in_float64(tmp_path / "lossy.onnx", 1e6)
    with pytest.raises(
        GateFailed, match=r"rewritten nodes are n_d, n_a, n_b: change the model so that float32 is enough"
    ) as caught:
        preflight(lossy, fix=True, out=tmp_path / "fixed.onnx")
    assert caught.value.value is not None
    assert 1e-3 < caught.value.value < 0.1
    assert not (tmp_path / "fixed.onnx").exists()
    with pytest.raises(
        NothingPassed, match=r"could be made.*change the model so that float32 is enough.*which computes in float64"
    ) as refused:
        accel.optimize(
            lossy.path, out=tmp_path / "o", target="tensorrt-rtx", compute_capabilities=["8.6"], precision="fp32"
        )
    assert "--max-drop" not in str(refused.value)


def test_what_was_rewritten_is_said_in_words(cli: Any, tmp_path: Path) -> None:
    """Checks that preflight prints "1 weight" and not "1 weights", and prints "float64 as float32" and not "True"."""
    mild = in_float64(tmp_path / "mild.onnx", 2.0)
    said = " ".join(cli("preflight", mild.path, "--fix", "-o", tmp_path / "f.onnx").stdout.split())  # long paths wrap
    assert "refuses 3 nodes" in said
    assert "rewritten float64 as float32; 0 nodes still refused" in said
    ran = cli("preflight", foreign(tmp_path / "m.onnx").path, "--fix", "-o", tmp_path / "g.onnx")
    said = " ".join(ran.stdout.split())
    assert "rewritten 1 bias, 1 weight, 1 activation; 0 nodes still refused" in said


def test_what_preflight_can_not_take(cli: Any, tmp_path: Path) -> None:
    """Checks that -o without --fix is an error, because preflight writes a file only with --fix. Also checks that the
    error for a Python factory advises `accel export`."""
    src = foreign(tmp_path / "m.onnx")
    ran = cli("preflight", src.path, "-o", tmp_path / "x.onnx")
    assert (ran.code, ran.stdout) == (2, "")
    assert "is only written with --fix" in ran.stderr
    (tmp_path / "net.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    ran = cli("preflight", f"{tmp_path / 'net.py'}:make")
    assert ran.code == 2
    assert "export it with accel export" in ran.stderr


def test_float8_of_another_toolkit(tmp_path: Path) -> None:
    """Fails if preflight reports a valid float8 file as invalid. ONNX Runtime fuses the QDQ nodes of this file into an
    int8 product. Also fails if the outputs differ from float8 arithmetic, or if accel can't build an engine from the
    file. For a GPU without float8, optimize must not return the unchanged file."""
    import ml_dtypes

    import accel

    float8 = ml_dtypes.float8_e4m3fn
    weight = RNG.standard_normal((16, 8)).astype(np.float32)
    scale = np.float32(np.abs(weight).max() / 448)
    src = artifact(
        tmp_path / "f8.onnx",
        [
            node("QuantizeLinear", "x xs xz", "xq"),
            node("DequantizeLinear", "xq xs xz", "xd"),
            node("DequantizeLinear", "w ws", "wd"),
            node("MatMul", "xd wd", "y"),
        ],
        {"x": (FLOAT, ["batch", 16])},
        {"y": (FLOAT, ["batch", 8])},
        {"xs": np.float32(0.01), "xz": np.zeros((), float8), "w": (weight / scale).astype(float8), "ws": scale},
        opset=20,
    )
    x = RNG.standard_normal((3, 16)).astype(np.float32)
    xd = (x / np.float32(0.01)).astype(float8).astype(np.float32) * np.float32(0.01)
    wd = (weight / scale).astype(float8).astype(np.float32) * scale
    with accel.load(src.path) as session:
        found = session.run({"x": x})["y"]
    assert np.allclose(found, xd @ wd, rtol=1e-5, atol=1e-5)
    result = accel.optimize(src.path, out=tmp_path / "out", target="tensorrt-rtx", compute_capabilities=["8.9"])
    assert result.chosen == "tensorrt-rtx fp8"
    with pytest.raises(UnsupportedHere, match=r"8\.6 has no fp8; use int8 or build for 8\.9"):
        accel.optimize(src.path, out=tmp_path / "old", target="tensorrt-rtx", compute_capabilities=["8.6"])
