"""Proves that bad input on the command line gives exit code 1 or 2 and one line that names the fix. The command must
leave no new file behind, and must not change other files."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.tables.stage_table import STAGES
from tests.support.orphans import assert_no_children

Cli = Callable[..., Any]


def small(op: str = "MatMul", domain: str = "") -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], domain=domain)],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Makes one valid file, and files with contents that don't match the names."""
    good = small().SerializeToString()
    files = {
        "good.onnx": good,
        "empty.onnx": b"",
        "cut.onnx": good[: len(good) // 2],
        "text.onnx": b"this is not a model, it is a sentence\n",
        "png.onnx": b"\x89PNG\r\n\x1a\n" + bytes(200),
        "zeros.onnx": bytes(4096),
        "no_op.onnx": small("DoesNotExist").SerializeToString(),
        "foreign.onnx": small("Fancy", "com.acme").SerializeToString(),
    }
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    outside = small()
    del outside.graph.initializer[:]
    tensor = outside.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../../etc/passwd"), ("length", "64")):
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "outside.onnx").write_bytes(outside.SerializeToString())
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = "lost.data"
    (tmp_path / "lost.onnx").write_bytes(outside.SerializeToString())
    opset = small()
    opset.opset_import[0].version = 99
    (tmp_path / "opset99.onnx").write_bytes(opset.SerializeToString())
    x = np.ones((8, 4), np.float32)
    nan = x.copy()
    nan[3, 1] = np.nan
    np.savez(tmp_path / "good.npz", x=x)
    np.savez(tmp_path / "nan.npz", x=nan)
    np.savez(tmp_path / "huge.npz", x=np.where(np.arange(32).reshape(8, 4) == 22, 1e39, 0.0))
    np.savez(tmp_path / "names.npz", y=x)
    np.savez(tmp_path / "dtype.npz", x=x.astype("U3"))
    np.savez(tmp_path / "shape.npz", x=np.ones((8, 5), np.float32))
    np.savez(tmp_path / "none.npz", x=np.ones((0, 4), np.float32))
    np.savez(tmp_path / "pickled.npz", x=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.onnx").write_text("somebody's own")
    metrics = ["def raises(outputs, data):", "    return 1 / 0", "def nan(outputs, data):", "    return float('nan')"]
    metrics += ["def several(outputs, data):", "    return [0.5, 0.7]", "def nothing(outputs, data):", "    pass"]
    (tmp_path / "metric.py").write_text("\n".join([*metrics, "number = 3", ""]))
    return tmp_path


OPTIMIZE = ("optimize", "{d}/good.onnx", "--target", "ort-cpu", "-o", "{d}/out")

# Each row holds the arguments, the exit code, and a pattern for the message.
CASES: list[tuple[tuple[str, ...], int, str]] = [
    (("optimize", "{d}/gone.onnx", "-o", "{d}/out"), 2, "does not exist"),
    (("optimize", "{d}/empty.onnx", "-o", "{d}/out"), 2, "is empty; export it again"),
    (("optimize", "{d}/cut.onnx", "-o", "{d}/out"), 2, "truncated; export it again"),
    (("optimize", "{d}/text.onnx", "-o", "{d}/out"), 2, "not an ONNX file"),
    (("optimize", "{d}/png.onnx", "-o", "{d}/out"), 2, "not an ONNX file"),
    (("optimize", "{d}/zeros.onnx", "-o", "{d}/out"), 2, "ONNX"),
    (("optimize", "{d}/no_op.onnx", "-o", "{d}/out"), 2, "DoesNotExist"),
    (("optimize", "{d}/foreign.onnx", "-o", "{d}/out"), 2, "Fancy"),
    (("optimize", "{d}/outside.onnx", "-o", "{d}/out"), 2, "outside the model's folder; move that file"),
    (("optimize", "{d}/lost.onnx", "-o", "{d}/out"), 2, "lost.data"),
    (("optimize", "{d}/opset99.onnx", "-o", "{d}/out"), 2, "opset"),
    ((*OPTIMIZE, "--data", "{d}/gone.npz"), 2, "does not exist; check --data"),
    ((*OPTIMIZE, "--data", "{d}/nan.npz"), 2, "NaN or infinity in sample 3"),
    ((*OPTIMIZE, "--data", "{d}/huge.npz"), 2, "in sample 5 holds float64 numbers that are too large for the dtype"),
    ((*OPTIMIZE, "--data", "{d}/names.npz"), 2, "has no array 'x' (its arrays: y)"),
    ((*OPTIMIZE, "--data", "{d}/dtype.npz"), 2, "the model takes float32"),
    ((*OPTIMIZE, "--data", "{d}/shape.npz"), 2, "has shape [8, 5], but the model takes x:float32[batch,4]"),
    ((*OPTIMIZE, "--data", "{d}/none.npz"), 2, "holds no samples"),
    ((*OPTIMIZE, "--data", "{d}/pickled.npz"), 2, "can't read"),
    ((*OPTIMIZE, "--data", "{d}/text.npz"), 2, "write the file with numpy.savez"),
    ((*OPTIMIZE, "--target", "toaster"), 2, "unknown target 'toaster'"),
    ((*OPTIMIZE, "--precision", "int3"), 2, "unknown precision 'int3'"),
    ((*OPTIMIZE, "--precision", "fp16"), 2, "target ort-cpu has no fp16"),
    ((*OPTIMIZE, "--max-drop", "5"), 2, "give e.g. 0.01 for one percent"),
    ((*OPTIMIZE, "--sizes", "batch"), 2, "write NAME=SIZE"),
    ((*OPTIMIZE, "--sizes", "width=3"), 2, "no input has a dim called 'width'"),
    ((*OPTIMIZE, "--dim", "batch=4:2:1"), 2, "1 <= min <= opt <= max"),
    ((*OPTIMIZE, "--dim", "height=1:2:3"), 2, "no dynamic dim 'height'"),
    ((*OPTIMIZE, "--metric", "{d}/metric.py:raises", "--data", "{d}/good.npz"), 2, "ZeroDivisionError"),
    ((*OPTIMIZE, "--metric", "{d}/metric.py:nan", "--data", "{d}/good.npz"), 2, "returned nan"),
    (
        (*OPTIMIZE, "--metric", "{d}/metric.py:several", "--data", "{d}/good.npz"),
        2,
        "returned list; it has to return one",
    ),
    ((*OPTIMIZE, "--metric", "{d}/metric.py:nothing", "--data", "{d}/good.npz"), 2, "returned NoneType; it has to"),
    ((*OPTIMIZE, "--metric", "{d}/metric.py:gone", "--data", "{d}/good.npz"), 2, "has no 'gone'"),
    ((*OPTIMIZE, "--metric", "{d}/metric.py:number", "--data", "{d}/good.npz"), 2, "not a function"),
    ((*OPTIMIZE, "--metric", "{d}/metric.py:nan"), 2, "pass --data"),
    (("optimize", "{d}/good.onnx", "-o", "{d}/file"), 1, "is a file; give a folder"),
    (("optimize", "{d}/good.onnx", "-o", "{d}/mine"), 1, "not made by accel"),
    (("verify", "{d}/good.onnx", "{d}/gone.onnx"), 2, "does not exist"),
    (("verify", "{d}/good.onnx", "{d}/text.onnx"), 2, "not an ONNX file"),
    (("verify", "{d}/good.onnx", "{d}/good.onnx", "--data", "{d}/nan.npz"), 2, "NaN"),
    (("bench", "{d}/gone.onnx"), 2, "does not exist"),
    (("bench", "{d}/text.onnx"), 2, "not an ONNX file"),
    (("inspect", "{d}/gone"), 2, "no file, folder or importable module"),
    (("inspect", "{d}/good.onnx", "--check"), 1, "no manifest"),
    (("export", "{d}/metric.py:number", "-o", "{d}/o.onnx"), 2, "not callable"),
    (("export", "{d}/good.onnx", "-o", "{d}/o.onnx"), 2, "accel optimize"),
    (("exprot",), 2, "Did you mean 'export'?"),
    (("export",), 2, "Missing argument"),
]
MISTYPED = ("exprot", "export")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("words", "code", "message"), CASES, ids=lambda v: " ".join(v) if isinstance(v, tuple) else None
)
def test_bad_input(cli: Cli, corpus: Path, words: tuple[str, ...], code: int, message: str) -> None:
    """Checks that bad input gives the right exit code and a one-line message with a fix. Also checks that the command
    makes and changes no files."""
    before = snapshot(corpus)
    ran = cli(*(word.format(d=corpus) for word in words), *(["-q"] if len(words) > 1 else []))
    assert ran.code == code, ran.stderr
    assert message in ran.stderr
    assert "should not have happened" not in ran.stderr
    if ran.stderr.startswith("Usage: "):
        # For a mistyped command line, the fix is click's hint to use --help.
        assert words[0] in MISTYPED, ran.stderr
        assert re.search(r"^Try 'accel.* --help' for help\.$", ran.stderr, re.MULTILINE), ran.stderr
    else:
        assert re.fullmatch(r"accel: error: .*; \S.*\n", ran.stderr), ran.stderr
    assert ran.stdout == ""
    after = snapshot(corpus)
    assert {k: v for k, v in after.items() if "__pycache__" not in k} == before


def test_a_missing_extra_is_one_line(cli: Cli, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the error for a missing toolkit is one line with the toolkit's install command."""
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n.startswith("openvino") else real(n, *a))
    monkeypatch.setitem(sys.modules, "openvino", None)
    ran = cli("optimize", corpus / "good.onnx", "--target", "openvino", "-o", corpus / "out", "-q")
    assert ran.code == 2, ran.stderr
    assert 'pip install "accel-toolchain[openvino]"' in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "optimize {d}/good.onnx -o {d}/locked/out",
        "export {d}/good.onnx --to openvino -o {d}/locked/out",
        "bench {d}/good.onnx --rounds 5 -o {d}/locked/report.html",
        "inspect {d}/good.onnx --graph {d}/locked/graph.html",
    ],
)
def test_no_permission(corpus: Path, words: str) -> None:
    """Checks that accel refuses a folder without write permission before the work begins. Also checks that accel prints
    one line with the fix, and makes no files."""
    locked = corpus / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    before = snapshot(corpus)
    command = [sys.executable, "-m", "accel", *words.format(d=corpus).split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_no_root)
    assert (ran.returncode, ran.stdout) == (1, ""), ran.stderr
    assert re.fullmatch(r"accel: error: no permission to write .*; choose another .*\n", ran.stderr), ran.stderr
    assert snapshot(corpus) == before
    assert list(locked.iterdir()) == []


def _no_root() -> None:
    """Drops root's right to write to any file (CAP_DAC_OVERRIDE) before the child process starts its program."""
    if os.geteuid() == 0:
        drop, override = 24, 1  # the values of PR_CAPBSET_DROP and CAP_DAC_OVERRIDE
        ctypes.CDLL(None).prctl(drop, override, 0, 0, 0)


def test_a_full_disk(cli: Cli, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a full disk gives a traceback, or leaves a half-written file under a final name."""
    import errno

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(corpus / "out" / "model.onnx"))

    monkeypatch.setattr(shutil, "copyfile", full)
    ran = cli(*(word.format(d=corpus) for word in OPTIMIZE), "--rounds", "5", "-q")
    assert ran.code == 1
    assert "no space left" in ran.stderr
    assert [p for p in (corpus / "out").rglob("*") if p.is_file()] == []


OUT = ("-o", "{d}/out")
INT8 = ("optimize", "{d}/good.onnx", "--data", "{d}/good.npz", *OUT)
RTX = (*INT8, "--target", "tensorrt-rtx", "--precision")
TO = ("export", "{d}/good.onnx", *OUT, "--to")
FILE = ("export", "{d}/good.onnx", "-o", "{d}/out/model.onnx")
# Maps each stage or phase to a command that runs the stage or phase.
INTERRUPTED_IN = {
    "onnx_from_torch": ("optimize", "{d}/net.py:make", "--input", "x:float32[batch,4]", *OUT),
    "onnx_from_onnx": (*FILE, "--opset", "19"),
    "preprocess": (*FILE, "--postprocess", "softmax"),
    "simplify": INT8,
    "quantize": INT8,
    "cast": (*RTX, "fp16"),
    "fuse_kernels": (*OPTIMIZE, "--precision", "fp32", "--kernels"),
    "fit_tensorrt": ("preflight", "{d}/good.onnx", "--fix", "-o", "{d}/out/model.onnx"),
    "openvino_from_onnx": INT8,
    "engine_from_onnx": (*RTX, "fp32"),
    "ncnn_from_onnx": (*TO, "ncnn"),
    "torch_from_onnx": (*TO, "torch"),
    "saved_model_from_onnx": (*TO, "saved_model"),
    "judging": INT8,
    "bench: round": INT8,
}
_AFTER_TENSORFLOW = "TensorFlow has to read a model before it, in the process that saved_model_from_onnx is tried with"
NOT_INTERRUPTED_IN = {
    **dict.fromkeys(("onnx_from_tensorflow", "onnx_from_tflite", "tflite_from_saved_model"), _AFTER_TENSORFLOW),
    **dict.fromkeys(
        ("adapter_inputs", "fuse_decoder", "lower_cache", "pack_weights", "stateful_from_onnx"),
        "a decoder is exported before it, which takes ten seconds",
    ),
    "pipeline_from_parts": "it copies the files of the parts, which takes too little time to hit",
}
FACTORY = """
import torch

def make():
    return torch.nn.Linear(4, 4)
"""


def test_no_stage_is_forgotten() -> None:
    """Checks that each stage is in ``INTERRUPTED_IN``, or has a reason in ``NOT_INTERRUPTED_IN``."""
    stages = {stage.name for stage in STAGES}
    assert set(INTERRUPTED_IN) & stages | set(NOT_INTERRUPTED_IN) == stages
    assert not set(INTERRUPTED_IN) & set(NOT_INTERRUPTED_IN)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, _one_cache: None) -> Path:
    """Makes the files of earlier runs in the folder that the commands write to."""
    folder = tmp_path_factory.mktemp("earlier")
    onnx.save(small(), folder / "good.onnx")
    quick: dict[str, Any] = {"precision": "fp32", "rounds": 5, "vary_session": False}
    accel.optimize(folder / "good.onnx", target="ort-cpu", out=folder / "out", **quick)
    accel.export(folder / "good.onnx", to="torch", out=folder / "out")
    accel.export(folder / "good.onnx", to="ncnn", out=folder / "out")
    return folder / "out"


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("stage", INTERRUPTED_IN)
def test_ctrl_c_in_each_stage(corpus: Path, earlier: Path, stage: str, own_cache: Path) -> None:
    """Checks that Ctrl-C leaves no file and no child process, and doesn't change the files of earlier runs. If a
    candidate has already passed, Ctrl-C must publish the best candidate. If no candidate has passed, Ctrl-C must give
    one line and exit code 1."""
    shutil.copytree(earlier, corpus / "out")
    (corpus / "net.py").write_text(FACTORY)
    before = snapshot(corpus)
    process = subprocess.Popen(
        [sys.executable, "-m", "accel", *(word.format(d=corpus) for word in INTERRUPTED_IN[stage])],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ACCEL_CACHE_DIR": str(own_cache), "PYTHONDONTWRITEBYTECODE": "1"},
        # A terminal sends SIGINT to the command and all its child processes, so the test starts the command in a
        # process group. A shell makes its background commands ignore SIGINT, and child processes inherit this setting.
        # Therefore ``preexec_fn`` restores the default handling of SIGINT.
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(f"accel: {stage}"):
            os.killpg(process.pid, signal.SIGINT)
            break
    stdout, rest = process.communicate(timeout=60)
    said = "".join(seen) + rest
    assert seen[-1].startswith(f"accel: {stage}"), said
    *progress, last = said.splitlines()
    files = {name: data for name, data in snapshot(corpus).items() if not name.startswith(own_cache.name)}
    # Each machine has its own order of candidates, so the output tells whether a candidate was judged before.
    if any(line.startswith("accel: judging") for line in seen[:-1]):
        assert process.returncode == 0, said
        assert "chosen" in stdout
        assert (corpus / "out" / "optimize.json").is_file()
        with accel.load(corpus / "out") as session:
            session.run(session.example_inputs())
        files, before = ({n: data for n, data in one.items() if not n.startswith("out/")} for one in (files, before))
    else:
        assert (process.returncode, stdout) == (1, ""), said
        assert last == "accel: error: interrupted; run the same command again to go on at the interrupted stage"
    # click prints a line break after the terminal's ^C, so stderr has an empty line.
    assert [line for line in progress if line and (not line.startswith("accel: ") or "error" in line)] == []
    assert files == before
    assert list((own_cache / "scratch").iterdir()) == []
    assert_no_children(process.pid, f"interrupted in {stage}")
