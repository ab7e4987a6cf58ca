r"""Proves that the clients of KServe and MLServer, and perf_analyzer, work unmodified with the server.

They need separate environments, because their packages conflict with the current tritonclient.

python -m venv kserve && kserve/bin/pip install kserve==0.21.0
python -m venv mlserver && mlserver/bin/pip install mlserver==1.7.1
python -m venv perf && perf/bin/pip install --no-deps tritonclient==2.51.0 nvidia-cuda-runtime-cu12
(The wheel contains perf_analyzer, which needs the system's libb64.so.0d and libcudart.so.12 on LD_LIBRARY_PATH.)
ACCEL_KSERVE=kserve ACCEL_MLSERVER=mlserver ACCEL_PERF_ANALYZER=perf/bin/perf_analyzer \
    python -m pytest -m nightly tests/serve/transports/test_other_clients.py
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import WEIGHTS, plain

KSERVE = """
import asyncio, json, sys
from importlib.metadata import version
import grpc, httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

grpc_port, http_port = sys.argv[1:]
x = np.arange(8, dtype=np.float32).reshape(2, 4)

def request(binary, model="linear"):
    given = InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    return InferRequest(model, [given], request_id="7")

def pair():
    inputs = [InferInput(name, [1, 2], "INT64") for name in "ab"] + [InferInput("text", [1, 1], "BYTES")]
    for one in inputs[:2]:
        one.set_data_from_numpy(np.ones((1, 2), np.int64))
    inputs[2].set_data_from_numpy(np.array([["caf\\u00e9"]], dtype=object))
    return InferRequest("pair", inputs)

def outputs(response):
    return {o.name: o.as_numpy().tolist() for o in response.outputs}

async def over_grpc():
    async with InferenceGRPCClient("127.0.0.1:" + grpc_port, retries=0) as client:
        found = {"live": await client.is_server_live(), "ready": await client.is_server_ready()}
        found["models"] = [await client.is_model_ready(name) for name in ("linear", "nothing")]
        answers = [await client.infer(request(binary)) for binary in (True, False)]
        found["y"] = [outputs(answer)["y"] for answer in answers]
        found["ids"] = [answer.id for answer in answers]
        found["pair"] = outputs(await client.infer(pair()))
        try:
            await client.infer(request(True, "nothing"))
        except grpc.RpcError as error:
            found["refused"] = error.code().name
    return found

async def over_http():
    base = "http://127.0.0.1:" + http_port
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    found = {"live": await client.is_server_live(base), "ready": await client.is_server_ready(base)}
    found["models"] = [await client.is_model_ready(base, name) for name in ("linear", "nothing")]
    answers = [await client.infer(base, request(binary), "linear") for binary in (True, False)]
    found["y"] = [outputs(answer)["y"] for answer in answers]
    found["ids"] = [answer.id for answer in answers]
    found["pair"] = outputs(await client.infer(base, pair(), "pair"))
    try:
        await client.infer(base, request(True, "nothing"), "nothing")
    except httpx.HTTPStatusError as error:
        found["refused"] = error.response.status_code
    await client.close()
    return found

found = {"grpc": asyncio.run(over_grpc()), "http": asyncio.run(over_http()), "version": version("kserve")}
print(json.dumps(found, default=lambda value: value.decode()))
"""

# What MLServer's users send: requests of its codecs as JSON and over gRPC. MLServer itself sends typed contents.
MLSERVER = """
import json, sys, urllib.request
from importlib.metadata import version
import grpc
import numpy as np
from mlserver.codecs import NumpyCodec, NumpyRequestCodec, StringCodec
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.grpc.dataplane_pb2 import ModelReadyRequest, ServerMetadataRequest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest, InferenceResponse

grpc_port, http_port = sys.argv[1:]
x = np.arange(8, dtype=np.float32).reshape(2, 4)

def linear():
    return InferenceRequest(id="7", inputs=[NumpyCodec.encode_input("x", x)])

def pair():
    inputs = [NumpyCodec.encode_input(name, np.ones((1, 2), np.int64)) for name in "ab"]
    return InferenceRequest(inputs=[*inputs, StringCodec.encode_input("text", ["caf\\u00e9"])])

def outputs(response):
    found = {}
    for one in response.outputs:
        codec = StringCodec if one.datatype == "BYTES" else NumpyCodec
        value = codec.decode_output(one)
        found[one.name] = value if codec is StringCodec else value.tolist()
    return found

def over_http(model, request):
    made = urllib.request.Request(
        "http://127.0.0.1:" + http_port + "/v2/models/" + model + "/infer",
        data=request.model_dump_json(exclude_none=True).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(made, timeout=60) as response:
        return InferenceResponse.model_validate_json(response.read())

with grpc.insecure_channel("127.0.0.1:" + grpc_port) as channel:
    stub = GRPCInferenceServiceStub(channel)

    def over_grpc(model, request):
        answer = stub.ModelInfer(ModelInferRequestConverter.from_types(request, model_name=model))
        return ModelInferResponseConverter.to_types(answer)

    found = {"ready": stub.ModelReady(ModelReadyRequest(name="linear")).ready}
    found["server"] = stub.ServerMetadata(ServerMetadataRequest()).name
    for name, way in (("grpc", over_grpc), ("http", over_http)):
        answer = way("linear", linear())
        found[name] = {"y": outputs(answer)["y"], "id": answer.id, "pair": outputs(way("pair", pair()))}
    try:
        over_grpc("nothing", linear())
    except grpc.RpcError as error:
        found["refused"] = error.code().name
print(json.dumps(found | {"version": version("mlserver")}))
"""


def test_what_kserve_reads_of_a_probe(start: Any, repository: Path) -> None:
    """Checks that the health routes return a JSON body. KServe's REST client parses the JSON body that the protocol
    defines."""
    process = start(repository, http_port=0)
    assert json.loads(plain(process, "/v2/health/live")[1]) == {"live": True}
    assert json.loads(plain(process, "/v2/health/ready")[1]) == {"ready": True}
    process.server.drain(0.0)
    status, body = plain(process, "/v2/health/ready")
    assert (status, json.loads(body)) == (503, {"ready": False})


@pytest.mark.nightly
@pytest.mark.skipif("ACCEL_KSERVE" not in os.environ, reason="ACCEL_KSERVE names no environment")
def test_the_client_of_kserve(repository: Path, serve: Any) -> None:
    """Checks that the server understands each call of KServe's clients, and that these clients understand each
    answer."""
    ports = serve(str(repository)).wait_for("serving")["ports"]
    python = Path(os.environ["ACCEL_KSERVE"]) / "bin" / "python"
    ran = subprocess.run(
        [str(python), "-c", KSERVE, str(ports["grpc"]), str(ports["http"])],
        capture_output=True, text=True, timeout=300, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    print("kserve", found["version"])
    for face, refused in (("grpc", "NOT_FOUND"), ("http", 404)):
        answer = found[face]
        assert (answer["live"], answer["ready"], answer["models"]) == (True, True, [True, False])
        for y in answer["y"]:
            np.testing.assert_allclose(y, np.arange(8).reshape(2, 4) @ WEIGHTS, rtol=1e-5)
        assert answer["ids"] == ["7", "7"]
        assert answer["pair"] == {"total": [[2, 2]], "same": [["café"]]}
        assert answer["refused"] == refused


@pytest.mark.nightly
@pytest.mark.skipif("ACCEL_MLSERVER" not in os.environ, reason="ACCEL_MLSERVER names no environment")
def test_the_client_of_mlserver(repository: Path, serve: Any, tmp_path: Path) -> None:
    """Checks that the server understands what MLServer's codecs and its command `mlserver infer` send, and that they
    understand each answer."""
    ports = serve(str(repository)).wait_for("serving")["ports"]
    programs = Path(os.environ["ACCEL_MLSERVER"]).absolute() / "bin"

    def run(*words: str) -> str:
        ran = subprocess.run(
            words, capture_output=True, text=True, timeout=300, check=False, env={"PATH": os.environ["PATH"]},
            cwd=tmp_path,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    found = json.loads(run(str(programs / "python"), "-c", MLSERVER, str(ports["grpc"]), str(ports["http"])))
    print("mlserver", found["version"])
    assert (found["ready"], found["server"], found["refused"]) == (True, "accel", "NOT_FOUND")
    wanted = np.arange(8).reshape(2, 4) @ WEIGHTS
    for face in ("grpc", "http"):
        np.testing.assert_allclose(found[face]["y"], wanted, rtol=1e-5)
        assert found[face]["id"] == "7"
        assert found[face]["pair"] == {"total": [[2, 2]], "same": ["café"]}
    rows = np.arange(8).reshape(2, 1, 4).tolist()
    requests = [{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": row[0]}]} for row in rows]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    words = ["infer", "-u", f"127.0.0.1:{ports['http']}", "-m", "linear", "-i", "in.jsonl", "-o", "out.jsonl"]
    run(str(programs / "mlserver"), *words)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    answers.sort(key=lambda one: one["parameters"]["batch_index"])
    found_y = [one["outputs"][0]["data"] for one in answers]
    np.testing.assert_allclose(found_y, wanted, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.skipif("ACCEL_PERF_ANALYZER" not in os.environ, reason="ACCEL_PERF_ANALYZER names no program")
@pytest.mark.parametrize(
    ("face", "options"),
    [
        ("grpc", []),
        ("http", []),
        ("grpc", ["--async", "--streaming"]),
        ("grpc", ["--shared-memory", "system"]),
        ("http", ["--shared-memory", "system"]),
    ],
    ids=["grpc", "http", "stream", "grpc-memory", "http-memory"],
)
def test_perf_analyzer(repository: Path, serve: Any, tmp_path: Path, face: str, options: list[str]) -> None:
    """Checks that perf_analyzer can read the model's metadata, config and statistics, and that perf_analyzer's requests
    succeed."""
    served = serve(str(repository))
    ports = served.wait_for("serving")["ports"]
    report = tmp_path / "report.csv"
    ran = subprocess.run(
        [
            os.environ["ACCEL_PERF_ANALYZER"], "-m", "linear", "-i", face, "-u", f"127.0.0.1:{ports[face]}", "-b", "2",
            "--concurrency-range", "2", "--measurement-mode", "count_windows", "--measurement-request-count", "200",
            "--stability-percentage", "999", "-f", str(report), *options,
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [row] = csv.DictReader(report.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0
    assert float(row["Server Compute Infer"]) > 0, "perf_analyzer reads the server's statistics"
    status, body = plain(type("Ports", (), {"ports": ports}), "/v2/models/linear/stats")
    statistics = json.loads(body)["model_stats"][0]["inference_stats"]
    assert status == 200
    assert (int(statistics["fail"]["count"]), int(statistics["success"]["count"]) >= 200) == (0, True)
