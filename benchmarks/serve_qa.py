"""Runs test files of Triton's own QA, unedited, against `accel serve`.

Usage:

    python benchmarks/serve_qa.py --server SERVER    # writes results/serve_qa.md

SERVER is a clone (also a bare one) of github.com/triton-inference-server/server. Needs the ports 8000 and 8001, which
the tests use, the packages psutil and requests, and takes some five minutes for each gRPC transport. `--kept FILE`
keeps what was run, so that the rest can be run later. All requests go to localhost.

Each test runs in a process of its own. The models are those of Triton's example repository and of its Python models,
and identity models as `qa/common/gen_qa_identity_models.py` describes them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import onnx
import tritonclient.http as triton
from client_runs import TRANSPORTS, Run, Runs, add_options
from onnx import TensorProto, helper
from serve_clients import HTTP, MODELS, SECONDS, check_ports, commit, serving, unpacked

RESULT = Path(__file__).parent / "results" / "serve_qa.md"
QUEUE = """dynamic_batching { max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 8 ]
  default_queue_policy { max_queue_size: 1 } }
"""
# Why a test can't pass, by a part of its name or of what it says.
WHY = {
    "test_client_shm_disabled_by_default": "accel offers shared memory without an option; --tokens say who may use it",
    "test_content_encoding_chunked_manually": "sends Content-Length beside Transfer-Encoding: accel refuses (RFC 9112)",
    "test_descriptive_status_code": "an idle instance of accel doesn't wait for a preferred batch size",
    "test_negative_dimensions": "accel answers 400 where Triton answers 500",
    "causes total element count to exceed": "accel refuses the shape in other words",
    "test_repository_index_deeply_nested_json": "accel refuses JSON this deep in other words",
    "GPUs not supported": "needs a GPU",
    "test_infer_integer_overflow": "accel's integers don't overflow, so it refuses the slice for its end",
    "[StatusCode.INVALID_ARGUMENT] failed to register shared memory region 'test_shm'": "accel checks the size first",
    "python_int32_int32_int32": "needs models that Triton's test script generates",
}


def identity(root: Path, name: str, kind: int, dims: list[int], count: int = 1, more: str = "") -> None:
    """Writes a model that returns its ``count`` inputs, with a batch of at most 8."""
    names = [(f"INPUT{k}", f"OUTPUT{k}") for k in range(count)]
    shape = [None, *(None if dim < 0 else dim for dim in dims)]
    graph = helper.make_graph(
        [helper.make_node("Identity", [one], [other]) for one, other in names],
        name,
        [helper.make_tensor_value_info(one, kind, shape) for one, _ in names],
        [helper.make_tensor_value_info(other, kind, shape) for _, other in names],
    )
    (root / name / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, root / name / "1" / "model.onnx")
    datatype = {TensorProto.FLOAT: "FP32", TensorProto.FLOAT16: "FP16", TensorProto.STRING: "STRING"}[kind]
    lines = [f'name: "{name}"', 'platform: "onnxruntime_onnx"', "max_batch_size: 8", more]
    for one, other in names:
        lines += [f'input {{ name: "{one}" data_type: TYPE_{datatype} dims: {dims} }}']
        lines += [f'output {{ name: "{other}" data_type: TYPE_{datatype} dims: {dims} }}']
    (root / name / "config.pbtxt").write_text("\n".join(lines))


def http_models(root: Path, clone: Path) -> None:
    identity(root, "onnx_zero_1_float32", TensorProto.FLOAT, [-1])
    identity(root, "onnx_zero_1_float32_queue", TensorProto.FLOAT, [-1], more=QUEUE)
    identity(root, "onnx_zero_1_object", TensorProto.STRING, [-1])
    identity(root, "onnx_zero_1_object_1_element", TensorProto.STRING, [1])
    identity(root, "onnx_zero_1_float16", TensorProto.FLOAT16, [-1, -1])
    identity(root, "onnx_zero_3_float32", TensorProto.FLOAT, [-1], count=3)
    text = clone / MODELS / "simple_identity"
    shutil.copytree(text, root / "simple_identity")
    for kind in ("INT64", "UINT64", "INT32", "FP32", "FP64"):
        copied = root / f"simple_identity_{kind.lower()}"
        shutil.copytree(text, copied)
        config = (copied / "config.pbtxt").read_text().replace("TYPE_STRING", f"TYPE_{kind}")
        (copied / "config.pbtxt").write_text(config.replace('"simple_identity"', f'"{copied.name}"'))


def eight(root: Path, clone: Path) -> None:
    shutil.copytree(clone / MODELS, root)  # some have no file, but the repository's index lists them


def seven(root: Path, clone: Path) -> None:
    eight(root, clone)
    shutil.rmtree(root / "inception_onnx")


def delayed(root: Path, clone: Path) -> None:
    source = clone / "qa" / "python_models" / "execute_delayed_model"
    (root / "simple" / "1").mkdir(parents=True)
    shutil.copy(source / "config.pbtxt", root / "simple")
    shutil.copy(source / "model.py", root / "simple" / "1")


@dataclass(frozen=True)
class Group:
    """Tests that need the same server: the file, a regular expression of the tests' names, the models, the options of
    the server, and the values of CLIENT_TYPE to run the tests with."""

    file: str
    tests: str
    models: Callable[[Path, Path], None]
    options: tuple[str, ...] = ()
    clients: tuple[str, ...] = ("http",)


SKIPPED = {"HttpTest.test_loading_large_invalid_model": "not run: its client takes 8 GB of memory"}
EXPLICIT = ("--load-model", "*")
GROUPS = (
    Group("L0_shared_memory/shared_memory_test.py", r"SharedMemoryTest\.", seven, EXPLICIT, ("http", "grpc")),
    Group("L0_http/python_http_aio_test.py", "", seven, ("--mode", "none")),
    Group("L0_grpc/python_grpc_aio_test.py", "", eight, ("--mode", "none")),
    Group("L0_http/http_test.py", "", http_models, EXPLICIT),
    Group("L0_shared_memory/shared_memory_test.py", "Unregister.*http", delayed, EXPLICIT),
    Group("L0_shared_memory/shared_memory_test.py", "Unregister.*grpc", delayed, EXPLICIT, ("grpc",)),
)


def tests_of(path: Path) -> list[str]:
    """Returns the names of the tests in a file, as ``Class.test``."""
    found, name = [], ""
    for line in path.read_text().splitlines():
        if match := re.match(r"class (\w+)", line):
            name = match[1]
        elif match := re.match(r"    (?:async )?def (test_\w+)", line):
            found.append(f"{name}.{match[1]}")
    return found


def named(path: Path, test: str, client: str) -> str:
    return f"{path.parent.name}/{path.name} {test}" + (f" ({client})" if "Shared" in test else "")


def run(path: Path, test: str, client: str, transport: str) -> Run:
    name = named(path, test, client)
    if test in SKIPPED:
        return Run(name, False, SKIPPED[test], transport)
    env = {**os.environ, "CLIENT_TYPE": client}
    words = [sys.executable, path.name, test]
    try:
        done = subprocess.run(words, cwd=path.parent, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Run(name, False, f"no end after {SECONDS} s", transport)
    finally:
        with suppress(Exception), triton.InferenceServerClient(f"localhost:{HTTP}") as made:
            made.unregister_system_shared_memory()
    if done.returncode == 0:
        return Run(name, True, "", transport)
    lines = re.findall(r"^(?:\w+\.)*(?:\w*(?:Error|Exception)): .*", done.stderr, re.MULTILINE)
    said = lines[-1].replace("|", "/")[:240] if lines else done.stderr[-200:].replace("\n", " ")
    return Run(name, False, next((why for word, why in WHY.items() if word in name + done.stderr), said), transport)


def table(runs: Runs, names: list[str], clone: Path) -> str:
    lines = [
        "# Tests of Triton's QA against accel serve",
        "",
        f"Made by `python benchmarks/serve_qa.py`, with the commit {commit(clone)} of Triton's server repository. The",
        f"test files are unedited. {runs.passed(names)} of {len(names)} tests pass on each gRPC transport.",
        "",
        *runs.table("test", names, TRANSPORTS),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=Path, required=True)
    add_options(parser, "tests'")
    given = parser.parse_args()
    check_ports()
    runs, names = Runs(given.kept), list[str]()
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "server"
        for part in (MODELS, "qa"):
            unpacked(given.server, part, clone)
        for number, group in enumerate(GROUPS):
            path = clone / "qa" / group.file
            chosen = [one for one in tests_of(path) if re.search(group.tests, one) and re.search(given.only, one)]
            models = Path(name) / f"models-{number}"
            group.models(models, clone)
            pairs = [(test, client) for test in chosen for client in group.clients]
            names += [named(path, *pair) for pair in pairs]
            for transport in given.transport or TRANSPORTS:
                todo = [pair for pair in pairs if not runs.has(named(path, *pair), transport)]
                if not todo:
                    continue
                with serving(models, transport, *group.options):
                    for pair in todo:
                        runs.add(run(path, *pair, transport))
    if not given.only:
        RESULT.write_text(table(runs, names, given.server), encoding="utf-8")


if __name__ == "__main__":
    main()
