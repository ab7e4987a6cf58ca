"""Proves that a ``model.py`` with a ``TritonPythonModel`` runs in a process of its own."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from tests.support import onnx_builder
from tests.support.serving import WEIGHTS, Served, Start, ask, client, linear, reasons, tensor, until

HEAD = """
import json, os, signal, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
"""
TWO = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
# A negative first number makes the model misbehave. -5 makes it write the file "waits" into its folder, and wait there
# for the file "go on".
DOUBLE = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.config = json.loads(args["model_config"])
        print("hello from", args["model_name"])

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            what = int(x.flat[0])
            if what == -1:
                error = pb_utils.TritonError("no negatives", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if what == -2:
                raise ValueError("a bug")
            if what == -3:
                os.kill(os.getpid(), signal.SIGSEGV)
            if what == -4:
                return []
            if what == -5:
                open(os.path.join(self.args["model_repository"], "waits"), "w").close()
            while what == -5 and not os.path.exists(os.path.join(self.args["model_repository"], "go on")):
                time.sleep(0.01)
            if what == -6:
                x = x.astype(np.float64)
            if what == -7:
                print("last words", flush=True)
                os._exit(3)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * x)]))
        return responses

    def finalize(self):
        open(os.path.join(self.args["model_repository"], "finalized"), "w").close()
"""


def write(root: Path, name: str, code: str, config: str | None) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(HEAD + code)
    if config is not None:
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')


def row(first: float, kind: type = np.float32) -> np.ndarray:
    return np.array([[first, 2, 3, 4]], dtype=kind)


def double(made: Any, first: float, model: str = "double") -> np.ndarray:
    found: np.ndarray = made.infer(model, [tensor("x", row(first), "FP32")]).as_numpy("y")
    return found


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write(root, "double", DOUBLE, f"max_batch_size: 8 dynamic_batching {{ }}\n{TWO}")
    linear(root / "linear" / "1")
    return root


def test_python_code_needs_permission(models: Path, start: Start) -> None:
    """Fails if a server runs Python code although nobody allowed it, or if the reason doesn't name the option."""
    process = start(models)
    assert "--allow-python-backend" in reasons(process.server.repository)["double"]
    assert process.server.repository.loaded() == ["linear"]


def test_responses_and_errors(models: Path, start: Start) -> None:
    """Fails if a request gets the answer or the error of another one, or if an error lacks its code."""
    process = start(models, allow_python_backend=True)
    with client(process.ports["grpc"]) as made:
        np.testing.assert_array_equal(double(made, 1), 2 * row(1))
        for first, status, says in (
            (-1, "INVALID_ARGUMENT", "no negatives"),
            (-2, "INTERNAL", "ValueError: a bug"),
            (-4, "INTERNAL", "execute returned 0 responses for 1 requests"),
            (-6, "INTERNAL", "gave FP64 for the output 'y', but the config has FP32"),
        ):
            with pytest.raises(InferenceServerException, match=says) as raised:
                double(made, first)
            assert raised.value.status() == f"StatusCode.{status}"
            np.testing.assert_array_equal(double(made, 1), 2 * row(1))


def test_a_batch_keeps_its_requests_apart(models: Path, start: Start) -> None:
    """Fails if one bad request of a batch fails the others, or if the model gets the batch as one request."""
    process = start(models, allow_python_backend=True)
    with client(process.ports["grpc"]) as made, ThreadPoolExecutor(8) as pool:
        slow = pool.submit(double, made, -5)  # while this request runs, the others gather
        until(lambda: process.server.under_way == 1)
        rest = [pool.submit(double, made, first) for first in (1, -1, 2, 3)]
        until(lambda: process.server.under_way == 5)
        (models / "double" / "go on").touch()
        for first, one in zip((1, -1, 2, 3), rest, strict=True):
            if first < 0:
                with pytest.raises(InferenceServerException, match="no negatives"):
                    one.result(30)
            else:
                np.testing.assert_array_equal(one.result(30), 2 * row(first))
        np.testing.assert_array_equal(slow.result(30), 2 * row(-5))
    [(_, _, found)] = process.server.statistics("double")
    assert found.execution_count < 5


@pytest.mark.parametrize(("first", "how"), [(-3, "signal SIGSEGV"), (-7, "exit code 3 after it printed 'last words'")])
def test_a_crash_costs_one_process(models: Path, start: Start, first: float, how: str) -> None:
    """Fails if a crash of the Python code fails another request, or if the next request finds no process."""
    config = models / "double" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group [ { count: 2 kind: KIND_CPU } ]")
    process = start(models, allow_python_backend=True)
    with client(process.ports["grpc"]) as made, ThreadPoolExecutor(1) as pool:
        other = pool.submit(double, made, -5)  # runs on the other instance during the crash
        until((models / "double" / "waits").exists)  # before, the next request might run with it as one batch
        with pytest.raises(InferenceServerException, match=f"ended its process: {how}") as raised:
            double(made, first)
        assert raised.value.status() == "StatusCode.INTERNAL"
        (models / "double" / "go on").touch()
        np.testing.assert_array_equal(other.result(30), 2 * row(-5))
        for _ in range(3):
            np.testing.assert_array_equal(double(made, 1), 2 * row(1))
        np.testing.assert_allclose(ask(made), [WEIGHTS.sum(0)], rtol=1e-5)


def test_any_bytes_and_large_tensors(tmp_path: Path, start: Start) -> None:
    """Fails if strings have to be text, or a tensor of many megabytes changes on its way through the memory."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(f"same_{t.name()}", t.as_numpy()) for t in r.inputs()])
                for r in requests]
"""
    config = """max_batch_size: 8
input [ { name: "raw" data_type: TYPE_STRING dims: [ 1 ] }, { name: "big" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "same_raw" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "same_big" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
    write(tmp_path, "same", code, config)
    process = start(tmp_path, allow_python_backend=True)
    raw = np.array([[b"\xff\xfe\x00jpeg"], [b""]], dtype=object)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as made:
        for count in (1 << 23, 5):
            big = np.random.default_rng(0).random((2, count), dtype=np.float32)
            found = made.infer("same", [tensor("raw", raw, "BYTES"), tensor("big", big, "FP32")])
            np.testing.assert_array_equal(found.as_numpy("same_big"), big)
            assert found.as_numpy("same_raw").tolist() == raw.tolist()


COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def test_a_model_completes_its_config(tmp_path: Path, start: Start) -> None:
    """Fails if a model without a config isn't served as its code says, or if a contradiction isn't found."""
    write(tmp_path, "complete", COMPLETE, None)
    write(tmp_path, "contradicts", COMPLETE, 'input [ { name: "x" data_type: TYPE_INT32 dims: [ 4 ] } ]')
    write(tmp_path, "larger", COMPLETE, "max_batch_size: 9")
    write(tmp_path, "nothing", DOUBLE, "max_batch_size: 0")
    process = start(tmp_path, allow_python_backend=True)
    [model] = process.server.repository.models()
    assert (model.name, model.scheduling.max_batch_size, model.scheduling.dynamic) == ("complete", 4, True)
    with client(process.ports["grpc"]) as made:
        np.testing.assert_array_equal(double(made, 1, "complete"), row(1))
    said = reasons(process.server.repository)
    assert "input 'x' has the data_type TYPE_INT32 in the config, but TYPE_FP32" in said["contradicts"]
    assert "the config has max_batch_size 9, but auto_complete_config sets 4" in said["larger"]
    assert "needs input and output in config.pbtxt, or a method auto_complete_config" in said["nothing"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise RuntimeError('no such library')", "failed in open: RuntimeError: no such library"),
        ("class Other:\n    pass", "has no class TritonPythonModel"),
        ("def", "SyntaxError"),
        ("os._exit(7)", "ended its process: exit code 7"),
        (DOUBLE.replace("self.args = args", 'raise KeyError("weights")'), "failed in initialize: KeyError"),
    ],
)
def test_code_that_cannot_be_loaded(tmp_path: Path, start: Start, code: str, says: str) -> None:
    """Fails if broken code ends the server, or if the index doesn't tell what is wrong with the code."""
    write(tmp_path, "broken", code, TWO)
    linear(tmp_path / "linear" / "1")
    process = start(tmp_path, allow_python_backend=True)
    assert says in reasons(process.server.repository)["broken"]
    assert process.server.repository.loaded() == ["linear"]


def test_finalize(models: Path, start: Start) -> None:
    """Fails if a model isn't finalized when it is unloaded, or if its process stays."""
    process = start(models, mode="explicit", models=("*",), allow_python_backend=True)
    [model] = process.server.repository.versions("double")
    [session] = model.executor._idle  # type: ignore[attr-defined]
    pid = session._process.pid
    process.server.unload("double")
    until(lambda: (models / "double" / "finalized").exists())
    until(lambda: not Path(f"/proc/{pid}").exists())


REPEAT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            [count] = pb_utils.get_input_tensor_by_name(request, "count").as_numpy()
            threading.Thread(target=self.send, args=(sender, int(count))).start()

    def send(self, sender, count):
        for i in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([i], np.int32))]))
        if count == 3:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("three is too many")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_decoupled_responses(tmp_path: Path, start: Start) -> None:
    """Fails if a decoupled model's responses are lost or come in another order, or if an error ends the model."""
    config = """model_transaction_policy { decoupled: true }
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
    write(tmp_path, "repeat", REPEAT, config)
    process = start(tmp_path, allow_python_backend=True)
    found: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as made:
        made.start_stream(lambda result, error: found.put(error if error is not None else result))
        for count, values in ((4, [0, 1, 2, 3]), (0, []), (3, [0, 1, 2]), (2, [0, 1])):
            given = tensor("count", np.array([count], np.int32), "INT32")
            made.async_stream_infer("repeat", [given], enable_empty_final_response=True)
            answers = [found.get(timeout=30) for _ in range(len(values) + 1)]
            assert [answer.as_numpy("i").tolist() for answer in answers[:-1]] == [[value] for value in values]
            if count == 3:
                assert "three is too many" in str(answers[-1])
            else:
                assert answers[-1].get_response().parameters["triton_final_response"].bool_param
        made.stop_stream()


ENDLESS = """
class TritonPythonModel:
    def execute(self, requests):
        [request] = requests
        sender = request.get_response_sender()
        i = 0
        while not request.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([i, os.getpid()], np.int32))]))
            i += 1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_model_learns_that_its_client_has_left(tmp_path: Path, start: Start) -> None:
    """Fails if a stream goes on without a client, or if its end costs the process of the model."""
    config = """model_transaction_policy { decoupled: true }
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
    write(tmp_path, "endless", ENDLESS, config)
    process = start(tmp_path, allow_python_backend=True)
    ids = set()
    for _ in range(2):
        found: queue.Queue[Any] = queue.Queue()
        with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as made:
            made.start_stream(lambda result, error, found=found: found.put(error or result))
            made.async_stream_infer("endless", [tensor("count", np.array([1], np.int32), "INT32")])
            for i in range(3):
                values = found.get(timeout=30).as_numpy("i")
                assert values[0] == i
                ids.add(int(values[1]))
            made.stop_stream(cancel_requests=True)
        until(lambda: process.server.under_way == 0)
    assert len(ids) == 1


def test_what_a_model_sees_of_a_request(tmp_path: Path, start: Start) -> None:
    """Fails if the id, the parameters, the sequence or the requested outputs of a request don't reach the model."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            said = [r.request_id(), json.loads(r.parameters()), r.correlation_id(), r.flags()]
            said.append(r.requested_output_names())
            text = np.array([json.dumps(said)], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("said", text)]))
        return responses
"""
    config = """sequence_batching { }
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] }, { name: "other" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
    write(tmp_path, "said", code, config)
    process = start(tmp_path, allow_python_backend=True)
    with client(process.ports["grpc"]) as made:
        found = made.infer(
            "said", [tensor("x", row(1)[0], "FP32")], request_id="7", sequence_id=5, sequence_start=True,
            parameters={"color": "red"}, outputs=[triton.InferRequestedOutput("said")],
        )  # fmt: skip
    assert found.as_numpy("said")[0] == b'["7", {"color": "red"}, 5, 1, ["said"]]'


def test_optional_inputs_and_controls(tmp_path: Path, start: Start) -> None:
    """Fails if an optional input has to be sent, or the controls and states of a sequence don't reach the code."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            given = {t.name(): t.as_numpy() for t in r.inputs()}
            total = given["total_in"] * (1 - given["start"]) + given.get("x", np.float32(100))
            made = [pb_utils.Tensor(name, total.astype(np.float32)) for name in ("total", "total_out")]
            responses.append(pb_utils.InferenceResponse(made))
        return responses
"""
    config = """max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] optional: true }, { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "total" data_type: TYPE_FP32 dims: [ 1 ] } ]
sequence_batching {
  control_input [ { name: "start" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
  state [ { input_name: "total_in" output_name: "total_out" data_type: TYPE_FP32 dims: [ 1 ] } ] }
"""
    write(tmp_path, "counter", code, config)
    process = start(tmp_path, allow_python_backend=True)
    x, n = tensor("x", np.array([[5]], np.float32), "FP32"), tensor("n", np.array([[1]], np.int32), "INT32")
    found = []
    with client(process.ports["grpc"]) as made:
        for at, inputs in enumerate(([x, n], [x, n], [n])):
            answer = made.infer("counter", inputs, sequence_id=9, sequence_start=at == 0, sequence_end=at == 2)
            found.append(answer.as_numpy("total").item())
        with pytest.raises(InferenceServerException, match=r"missing required input\(s\) \['n'\]"):
            made.infer("counter", [x], sequence_id=9, sequence_start=True)
    assert found == [5, 10, 110]


def test_the_server_and_its_python_processes(models: Path, serve: Callable[..., Served]) -> None:
    """Fails if what a model prints breaks the log, or if a Python process stays after the server was killed."""
    served = serve(str(models), "--allow-python-backend")
    served.wait_for("serving")
    assert served.wait_for("a Python model prints")["text"] == "hello from double"
    children = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.exists() and path.read_text().rpartition(")")[2].split()[1] == str(served.process.pid)
    ]
    assert len(children) == 1
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()
    until(lambda: not Path(f"/proc/{children[0]}").exists())
    assert [line for line in served.log if "level" not in line and line["message"] != "end of log"] == []


def test_an_ensemble_passes_bytes_to_python_code(tmp_path: Path, start: Start) -> None:
    """Fails if an ensemble refuses strings that are no text although its first step takes any bytes, if a step that
    takes only text gets bytes, or if an ensemble lacks the labels of the step that makes its output."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            sizes = np.array([[len(one) for one in given[:, 0]] * 4], np.float32)
            outputs = [pb_utils.Tensor("x", sizes), pb_utils.Tensor("kept", given)]
            made.append(pb_utils.InferenceResponse(outputs))
        return made
"""
    declared = """max_batch_size: 8
input [ { name: "image" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "kept" data_type: TYPE_STRING dims: [ 1 ] } ]"""
    root = tmp_path / "models"
    write(root, "sizes", code, declared)
    linear(root / "linear" / "1")
    (root / "linear" / "labels.txt").write_text("zero\none\ntwo\n")
    (root / "linear" / "config.pbtxt").write_text("""max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" } ]""")
    text = onnx_builder.node("Identity", "text", "same")
    (root / "text" / "1").mkdir(parents=True)
    shape = (TensorProto.STRING, ["batch", 1])
    onnx_builder.artifact(root / "text" / "1" / "model.onnx", [text], {"text": shape}, {"same": shape})
    (root / "all" / "1").mkdir(parents=True)
    (root / "all" / "config.pbtxt").write_text("""platform: "ensemble" max_batch_size: 8
input [ { name: "image" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "same" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "sizes" model_version: -1 input_map { key: "image" value: "image" }
    output_map { key: "x" value: "x" } output_map { key: "kept" value: "kept" } },
  { model_name: "linear" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } },
  { model_name: "text" model_version: -1 input_map { key: "text" value: "kept" }
    output_map { key: "same" value: "same" } } ] }""")
    process = start(root, allow_python_backend=True)
    with client(process.ports["grpc"]) as made:
        wanted = [triton.InferRequestedOutput("y", class_count=1), triton.InferRequestedOutput("same")]
        given = tensor("image", np.array([["hällo".encode()]], object), "BYTES")
        found = made.infer("all", [given], outputs=wanted)
        assert found.as_numpy("y")[0, 0].decode().split(":")[1:] == ["2", "two"]
        assert found.as_numpy("same")[0, 0].decode() == "hällo"
        only = [triton.InferRequestedOutput("y")]
        raw = tensor("image", np.array([[b"\xff\xfe"]], object), "BYTES")
        with pytest.raises(InferenceServerException, match=r"step 'text': input 'text' .* not UTF-8"):
            made.infer("all", [raw], outputs=only)
