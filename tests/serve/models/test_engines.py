"""Proves, with a fake session instead of a GPU, that the server loads engines by their manifest or config."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from accel.artifact import Artifact, Manifest, file_sha256, manifest_path
from accel.errors import BadFeeds
from accel.runtimes.tensorrt import choose_profile
from accel.serve.models import loading
from accel.signature import DimRange, Feeds, Signature, TensorSpec
from tests.support.fake_sessions import FakeSession
from tests.support.serving import Start, client

CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [4] }
output { name: "y" data_type: TYPE_FP32 dims: [4] }
dynamic_batching { max_queue_delay_microseconds: 200000 }
"""
SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", 4)),),
    (TensorSpec("y", "float32", ("batch", 4)),),
    {"batch": DimRange(1, 2, 8)},
)


class Engine(FakeSession):
    """Computes y = 2x. Records the artifact and the inputs of each run."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact.signature)
        self.artifact = artifact
        profiles = artifact.properties.get("profiles", ())
        self.profiles = [{n: tuple(map(tuple, ends)) for n, ends in profile.items()} for profile in profiles]

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        shapes = {name: value.shape for name, value in feeds.items()}
        if choose_profile(self.profiles, shapes) is None:  # type: ignore[arg-type]
            raise BadFeeds("outside the engine's profiles")
        self.runs.append(np.array(feeds["x"]))
        return {"y": feeds["x"] * 2}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Returns a list of all sessions that the test opens."""
    found: list[Engine] = []

    def open_engine(artifact: Artifact, runtime: Any, options: Any) -> Engine:
        found.append(Engine(artifact))
        return found[-1]

    monkeypatch.setattr(loading, "open_session", open_engine)
    return found


def ask_four(port: int, model: str, rows: int) -> None:
    """Sends requests from four clients at once, and checks that each client gets its own answer."""
    failed: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            x = np.full((rows, 4), number, np.float32)
            given = triton.InferInput("x", [rows, 4], "FP32")
            given.set_data_from_numpy(x)
            with client(port) as made:
                np.testing.assert_array_equal(made.infer(model, [given], client_timeout=60).as_numpy("y"), x * 2)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_the_profiles_of_a_manifest(tmp_path: Path, start: Start, opened: list[Engine]) -> None:
    """Fails if the server ignores the profiles of the manifest. The engine of this test takes 1 row or 6 to 8 rows, so
    a batch of 2 to 5 rows must be padded to 6."""
    path = tmp_path / "engine" / "1" / "model.engine"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"engine")
    profiles = [{"x": [[1, 4], [1, 4], [1, 4]]}, {"x": [[6, 4], [8, 4], [8, 4]]}]
    Manifest(
        kind="engine",
        signature=SIGNATURE,
        files={path.name: file_sha256(path)},
        properties={"toolkit": "tensorrt-rtx", "profiles": profiles},
    ).write(manifest_path(path))
    (tmp_path / "engine" / "config.pbtxt").write_text(CONFIG)
    process = start(tmp_path)
    ask_four(process.ports["grpc"], "engine", 3)
    [engine] = opened
    rows = [len(run) for run in engine.runs]
    assert set(rows) <= {1, 6, 7, 8}
    statistics = process.server.statistics("engine")[0][2]
    assert (statistics.success.count, statistics.fail.count) == (4, 0)


@pytest.mark.parametrize(
    ("name", "more", "toolkit"),
    [
        ("model.plan", "", "tensorrt"),
        ("model.engine", 'parameters { key: "toolkit" value { string_value: "tensorrt-rtx" } }', "tensorrt-rtx"),
        ("other.plan", 'default_model_filename: "other.plan"', "tensorrt"),
    ],
)
def test_an_engine_of_another_maker(
    tmp_path: Path, start: Start, opened: list[Engine], name: str, more: str, toolkit: str
) -> None:
    """Checks that an engine file in Triton's layout is found, and that the engine's signature is read from the
    config."""
    (tmp_path / "engine" / "1").mkdir(parents=True)
    (tmp_path / "engine" / "1" / name).write_bytes(b"engine")
    (tmp_path / "engine" / "config.pbtxt").write_text(CONFIG + more)
    process = start(tmp_path)
    ask_four(process.ports["grpc"], "engine", 2)
    [engine] = opened
    assert engine.artifact.properties["toolkit"] == toolkit
    [row] = process.server.index()
    config = process.server.model_config("engine")
    assert (row.state, config.platform, config.instance_group[0].kind) == ("READY", "tensorrt_plan", 1)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("", "inputs are unknown; build the engine again, or write config.pbtxt with the engine's input and output"),
        (
            CONFIG.replace("data_type: TYPE_FP32 dims: [4]", "dims: [4]"),
            "tensor 'x' has to have a data_type; add a data_type to the config",
        ),
        (CONFIG + "instance_group [{ kind: KIND_CPU }]", "an engine runs on a GPU; write KIND_GPU"),
    ],
)
def test_what_is_refused(tmp_path: Path, start: Start, opened: list[Engine], config: str, said: str) -> None:
    """Fails if an engine with neither manifest nor config is opened, or if an engine is opened on a CPU."""
    (tmp_path / "engine" / "1").mkdir(parents=True)
    (tmp_path / "engine" / "1" / "model.plan").write_bytes(b"engine")
    (tmp_path / "engine" / "config.pbtxt").write_text(config)
    [row] = start(tmp_path).server.index()
    assert said in row.reason
    assert opened == []
