"""Proves that an old release of Triton's Python client works with the server.

The old release needs a separate environment, which ``make test`` creates. To create the environment by hand, run:

python -m venv old && old/bin/pip install --no-deps -r tests/serve/transports/old_tritonclient.txt
ACCEL_OLD_TRITONCLIENT=old python -m pytest tests/serve/transports/test_old_client.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.serving import WEIGHTS

SCRIPT = """
import json, queue, sys
from importlib.metadata import version
import numpy as np
import tritonclient.grpc as g
import tritonclient.http as h

grpc_port, http_port = sys.argv[1:]
x = np.arange(8, dtype=np.float32).reshape(2, 4)
found = {"version": version("tritonclient")}
for name, module, port in (("grpc", g, grpc_port), ("http", h, http_port)):
    given = module.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(x)
    text = module.InferInput("text", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["caf\u00e9"]], dtype=object))
    a, b = (module.InferInput(n, [1, 2], "INT64") for n in "ab")
    for one in (a, b):
        one.set_data_from_numpy(np.ones((1, 2), np.int64))
    with module.InferenceServerClient("127.0.0.1:" + port) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("linear")
        config = client.get_model_config("linear", **({"as_json": True} if name == "grpc" else {}))
        metadata = client.get_model_metadata("linear", **({"as_json": True} if name == "grpc" else {}))
        y = client.infer("linear", [given], outputs=[module.InferRequestedOutput("y")], request_id="7").as_numpy("y")
        pair = client.infer("pair", [a, b, text])
        try:
            client.infer("nothing", [given])
            refused = ""
        except Exception as error:
            refused = str(error)
        client.unload_model("pair")
        gone = client.is_model_ready("pair")
        client.load_model("pair")
        index = client.get_model_repository_index(**({"as_json": True} if name == "grpc" else {}))
        statistics = client.get_inference_statistics("linear", **({"as_json": True} if name == "grpc" else {}))
        streamed = None
        if name == "grpc":
            answers = queue.Queue()
            client.start_stream(lambda result, error: answers.put((result, error)))
            for _ in range(3):
                client.async_stream_infer("linear", [given])
            pairs = [answers.get(timeout=30) for _ in range(3)]
            client.stop_stream()
            streamed = [result.as_numpy("y").tolist() for result, error in pairs if error is None]
    found[name] = {
        "config": (config.get("config") or config)["max_batch_size"],
        "inputs": [i["name"] for i in metadata["inputs"]],
        "y": y.tolist(),
        "total": pair.as_numpy("total").tolist(),
        "same": pair.as_numpy("same").tolist()[0][0].decode(),
        "refused": refused,
        "gone": gone,
        "models": sorted(m["name"] for m in (index.get("models") if isinstance(index, dict) else index)),
        "success": int(statistics["model_stats"][0]["inference_stats"]["success"]["count"]),
        "streamed": streamed,
    }
print(json.dumps(found))
"""


@pytest.mark.skipif(
    not Path(os.environ.get("ACCEL_OLD_TRITONCLIENT", "nothing"), "bin", "python").exists(),
    reason="ACCEL_OLD_TRITONCLIENT names no environment",
)
def test_an_older_client(repository: Path, serve: Any) -> None:
    """Checks that the server understands each call of the old client, and that the old client understands each
    answer."""
    served = serve(str(repository), "--mode", "explicit", "--load-model", "*")
    ports = served.wait_for("serving")["ports"]
    python = Path(os.environ["ACCEL_OLD_TRITONCLIENT"]) / "bin" / "python"
    ran = subprocess.run(
        [str(python), "-c", SCRIPT, str(ports["grpc"]), str(ports["http"])],
        capture_output=True, text=True, timeout=120, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert tuple(map(int, found["version"].split(".")[:2])) < (2, 61)
    print("tritonclient", found["version"])
    for number, name in enumerate(("grpc", "http")):
        answer = found[name]
        assert answer["config"] > 0
        assert answer["inputs"] == ["x"]
        np.testing.assert_allclose(answer["y"], np.arange(8).reshape(2, 4) @ WEIGHTS, rtol=1e-5)
        assert answer["total"] == [[2, 2]]
        assert answer["same"] == "café"
        assert "unknown model" in answer["refused"]
        assert answer["gone"] is False
        assert answer["models"] == ["linear", "pair"]
        assert answer["success"] == 1 + 4 * number
    assert len(found["grpc"]["streamed"]) == 3
    assert found["grpc"]["streamed"] == [found["grpc"]["y"]] * 3
    assert found["http"]["y"] == found["grpc"]["y"]
