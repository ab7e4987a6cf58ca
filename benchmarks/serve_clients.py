"""Runs the Python example scripts of Triton's client repository, unedited, against `accel serve`.

Usage:

    python benchmarks/serve_clients.py --client CLIENT --server SERVER    # writes results/serve_clients.md

CLIENT and SERVER are clones (also bare ones) of github.com/triton-inference-server/client and .../server. Needs the
ports 8000 and 8001, which the scripts use, and takes some minutes for each gRPC transport. `--kept FILE` keeps what was
run, so that the rest can be run later. All requests go to localhost.

The server gets the models of Triton's own example repository as they are. Some models are not in the repository, or
have weights that have to be downloaded. For these, the script writes models with the same names, inputs and outputs:
densenet_onnx, custom_identity_int32, repeat_int32, simple_string_dyna_sequence and the ensemble for images. Their
answers say nothing about images. The two scripts that load and unload models count the models of the repository, and
get a repository with as many as they expect."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import onnx
from client_runs import TRANSPORTS, Run, Runs, add_options
from serve_starters import running

RESULT = Path(__file__).parent / "results" / "serve_clients.md"
EXAMPLES, MODELS, IMAGES = "src/python/examples", "docs/examples/model_repository", "qa/images"
GRPC, HTTP = 8001, 8000
SECONDS = 120

HEAD = """<ir_version: 10, opset_import: ["" : 20]>\n"""
TEXTS = {
    "custom_identity_int32": "m (int32[batch, n] INPUT0) => (int32[batch, n] OUTPUT0) { OUTPUT0 = Identity (INPUT0) }",
    # An answer for each of 1,000 classes that depends on the image, without weights.
    "densenet_onnx": """m (float[1, 3, 224, 224] data_0) => (float[1, 1000, 1, 1] fc6_1)
      <int64[4] shape = {1, 1000, 1, 1}, int64[3] flat = {1, 3, 50176}, int64[3] cut = {1, 1, 1000},
       int64[3] start = {0, 0, 0}, int64[1] axis = {1}> {
      rows = Reshape (data_0, flat)
      one = Slice (rows, start, cut)
      fc6_1 = Reshape (one, shape)
    }""",
    "classes": """m (float[batch, 4] x) => (float[batch, 4] y) { y = Softmax (x) }""",
}
PYTHON = {
    "repeat_int32": (
        """max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]""",
        """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values, delays = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY"))
            sender = request.get_response_sender()
            for value, delay in zip(values, delays):
                time.sleep(delay / 1e6)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    ),
    "sizes": (
        """max_batch_size: 8
input [ { name: "image" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]""",
        """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            images = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            x = np.array([[len(image) % (k + 2) for k in range(4)] for image in images[:, 0]], np.float32)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("x", x)]))
        return found
""",
    ),
}
# Adds up the values of a sequence. The correlation id is added to the last value, as in Triton's own model.
SUM = """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        found = []
        for request in requests:
            value, start, end, key = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().flat[0]
                for name in ("INPUT", "START", "END", "CORRID")
            )
            self.sums[key] = int(value) + (0 if start else self.sums[key])
            answer = self.sums[key] + (int(key) if end else 0)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[answer]], np.int32))]))
        return found
"""
CLASSES = """max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]
"""
ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "sizes" model_version: -1 input_map { key: "image" value: "INPUT" }
    output_map { key: "x" value: "x" } },
  { model_name: "classes" model_version: -1 input_map { key: "x" value: "x" }
    output_map { key: "y" value: "OUTPUT" } } ] }
"""
IMAGE = ("-m", "densenet_onnx", "-s", "INCEPTION", "-c", "3")
ON_GRPC = ("-i", "grpc", "-u", f"localhost:{GRPC}")
# The options of the scripts that need some. A script with several rows runs several times.
OPTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "image_client.py": ((*IMAGE, "IMAGE"), (*IMAGE, "-a", "IMAGE"), (*IMAGE, *ON_GRPC, "--streaming", "-a", "IMAGE")),
    "grpc_image_client.py": ((*IMAGE, "IMAGE"),),
    "ensemble_image_client.py": (("-m", "ensemble", "IMAGE"), ("-m", "ensemble", *ON_GRPC, "IMAGE")),
    "memory_growth_test.py": ((), ("-i", "grpc")),
    "reuse_infer_objects_client.py": ((), ON_GRPC),
    **{
        f"simple_{kind}.py": ((), ("-d",))
        for kind in (
            "grpc_aio_sequence_stream_infer_client", "grpc_sequence_stream_infer_client",
            "grpc_sequence_sync_infer_client", "http_sequence_sync_infer_client",
        )
    },
}  # fmt: skip


# The number of models that a script expects.
COUNTED = {"simple_grpc_model_control.py": 8, "simple_http_model_control.py": 7}
# Why a script can't pass, whatever the server does.
WHY = {
    "attrdict": "imports attrdict, which Python 3.10 and later can't import",
    "unable to create cuda shared memory handle": "needs a GPU",
}


def unpacked(clone: Path, part: str, into: Path) -> Path:
    """Returns the folder ``part`` of a clone of a git repository, as committed."""
    into.mkdir(exist_ok=True)
    made = subprocess.run(["git", "-C", str(clone), "archive", "HEAD", part], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(into)], input=made.stdout, check=True)
    return into / part


def commit(clone: Path) -> str:
    words = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def add_models(root: Path) -> None:
    """Writes the models that are missing in Triton's example repository, and removes what can't be served."""
    shutil.rmtree(root / "inception_onnx")  # only a config; its weights have to be downloaded
    for name, text in TEXTS.items():
        (root / name / "1").mkdir(parents=True, exist_ok=True)
        onnx.save(onnx.parser.parse_model(HEAD + text), root / name / "1" / "model.onnx")
    config = (root / "simple_dyna_sequence" / "config.pbtxt").read_text()
    config = config.replace("simple_dyna_sequence", "simple_string_dyna_sequence").replace(
        'platform: "onnxruntime_onnx"', 'backend: "python"'
    )
    head, corrid, rest = config.partition("CONTROL_SEQUENCE_CORRID")
    PYTHON["simple_string_dyna_sequence"] = (head + corrid + rest.replace("TYPE_UINT64", "TYPE_STRING", 1), SUM)
    for name, (config, code) in PYTHON.items():
        (root / name / "1").mkdir(parents=True)
        backend = "" if "backend:" in config else 'backend: "python"\n'
        (root / name / "config.pbtxt").write_text(backend + config)
        imports = "import time\n\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
        (root / name / "1" / "model.py").write_text(imports + code)
    (root / "classes" / "labels.txt").write_text("one\ntwo\nthree\nfour\n")
    (root / "classes" / "config.pbtxt").write_text(CLASSES)
    (root / "ensemble" / "1").mkdir(parents=True)
    (root / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)


def named(script: str, options: tuple[str, ...]) -> str:
    return " ".join([script, *(word for word in options if word not in ("IMAGE", *ON_GRPC[2:], *IMAGE[1:]))])


def run(script: Path, options: tuple[str, ...], image: Path, transport: str) -> Run:
    words = [str(image) if word == "IMAGE" else word for word in options]
    name = named(script.name, options)
    try:
        found = subprocess.run(
            [sys.executable, str(script), *words], capture_output=True, text=True, timeout=SECONDS, cwd=script.parent
        )
    except subprocess.TimeoutExpired:
        return Run(name, False, f"no end after {SECONDS} s", transport)
    if found.returncode == 0:
        return Run(name, True, "", transport)
    lines = [line for line in (found.stdout + found.stderr).splitlines() if line.strip()]
    said = lines[-1].replace("|", "/")[:200] if lines else f"ended with {found.returncode}"
    return Run(name, False, next((why for word, why in WHY.items() if word in said), said), transport)


def rows_of(scripts: list[Path]) -> list[str]:
    """Returns the names of all runs of the scripts."""
    return [named(one.name, options) for one in scripts for options in OPTIONS.get(one.name, ((),))]


def run_all(scripts: list[Path], models: Path, image: Path, transport: str, runs: Runs, *more: str) -> None:
    """Runs the scripts with each of their options against one server, as far as they weren't run before."""
    todo = [one for one in scripts if not all(runs.has(name, transport) for name in rows_of([one]))]
    if not todo:
        return
    with serving(models, transport, *more):
        for script in todo:
            for options in OPTIONS.get(script.name, ((),)):
                if not runs.has(named(script.name, options), transport):
                    runs.add(run(script, options, image, transport))


@contextmanager
def serving(models: Path, transport: str, *more: str) -> Iterator[None]:
    """Starts a server, and waits until it is ready."""
    words = [sys.executable, "-m", "accel", "serve", str(models), "--mode", "explicit", "--allow-python-backend"]
    words += ["--server-name", "triton", "--transport", transport, *more]
    words += [] if "none" in more else ["--allow-model-upload"]
    with running(words, GRPC, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        for _ in range(SECONDS):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/v2/health/ready"):
                break
            time.sleep(1)
        yield


def table(runs: Runs, names: list[str], clones: list[Path]) -> str:
    scripts = {name.split()[0] for name in names}
    failing = {one.name.split()[0] for one in runs.all if not one.passed}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tritonclient", "grpcio")]
    lines = [
        "# The example scripts of Triton's client repository against accel serve",
        "",
        f"Made by `python benchmarks/serve_clients.py`, with the commits {commit(clones[0])} (client) and",
        f"{commit(clones[1])} (server), {' and '.join(versions)}. The scripts are unedited.",
        f"{len(scripts) - len(failing)} of {len(scripts)} scripts pass on each gRPC transport (`--transport`).",
        "",
        *runs.table("script", sorted(names), TRANSPORTS),
    ]
    return "\n".join(lines) + "\n"


def check_ports() -> None:
    for port in (GRPC, HTTP):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                sys.exit(f"port {port} is in use; end the program that uses it, because the scripts need this port")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", type=Path, required=True)
    parser.add_argument("--server", type=Path, required=True)
    add_options(parser, "scripts'")
    given = parser.parse_args()
    check_ports()
    runs = Runs(given.kept)
    with tempfile.TemporaryDirectory() as name:
        examples = unpacked(given.client, EXAMPLES, Path(name) / "client")
        models = unpacked(given.server, MODELS, Path(name) / "server")
        image = next(unpacked(given.server, IMAGES, Path(name) / "server").glob("mug.*"))
        scripts = [one for one in sorted(examples.glob("*.py")) if re.search(given.only, one.name)]
        counted = [one for one in scripts if one.name in COUNTED]
        for script in counted:
            for folder in sorted(models.iterdir())[-COUNTED[script.name] :]:
                shutil.copytree(folder, Path(name) / script.stem / folder.name)
        add_models(models)
        others = [one for one in scripts if one not in counted]
        for transport in given.transport or TRANSPORTS:
            for script in counted:
                run_all([script], Path(name) / script.stem, image, transport, runs)
            run_all(others, models, image, transport, runs, "--load-model", "*")
    if not given.only:
        RESULT.write_text(table(runs, rows_of(scripts), [given.client, given.server]), encoding="utf-8")


if __name__ == "__main__":
    main()
