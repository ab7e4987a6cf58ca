"""Proves that a repository loads, reloads and refuses models by their configs and versions."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from accel.artifact import Manifest, file_sha256, manifest_path
from accel.errors import BadRepository
from accel.serve.models import config as model_config
from accel.serve.protocol.inference import Code, ServeError
from accel.signature import DimRange, Signature, TensorSpec
from tests.support import onnx_builder as build
from tests.support.serving import FLOAT, WEIGHTS, Start, linear, reasons, scale


def test_a_model_without_a_config(tmp_path: Path, opened: Any) -> None:
    """Checks that accel derives the same config from a model file as Triton does. Triton's config enables batching and
    leaves the batch out of the dims."""
    linear(tmp_path / "linear" / "1")
    config = opened(tmp_path).get("linear").config
    assert (config.name, config.platform, config.backend) == ("linear", "onnxruntime_onnx", "onnxruntime")
    assert config.max_batch_size == 8
    assert config.HasField("dynamic_batching")
    assert [(t.name, list(t.dims)) for t in (*config.input, *config.output)] == [("x", [4]), ("y", [3])]


def test_a_model_without_a_batch(tmp_path: Path, opened: Any) -> None:
    """Fails if a fixed first dim is treated as a batch dim."""
    (tmp_path / "fixed" / "1").mkdir(parents=True)
    build.artifact(
        tmp_path / "fixed" / "1" / "model.onnx",
        [build.node("Relu", "x", "y")],
        {"x": (FLOAT, [1, 4])},
        {"y": (FLOAT, [1, 4])},
    )
    model = opened(tmp_path).get("fixed")
    assert model.config.max_batch_size == 0
    assert model.inputs["x"].shape == (1, 4)


@pytest.mark.parametrize(
    ("config", "batches"),
    [
        ("", True),
        ("max_batch_size: 0", False),
        ('name: "linear" max_batch_size: 0', False),
        ('name: "linear", max_batch_size : 0;', False),
        ("# max_batch_size: 0", True),
        ('parameters { key: "a" value { string_value: "\\nmax_batch_size: 0" } }', True),
    ],
)
def test_a_batch_size_that_is_given(tmp_path: Path, opened: Any, config: str, batches: bool) -> None:
    """Fails if batching is on although the config turns batching off, or if text that only resembles a setting turns
    batching off."""
    linear(tmp_path / "linear" / "1")
    (tmp_path / "linear" / "config.pbtxt").write_text(config)
    found = opened(tmp_path).index()
    if batches:
        assert opened(tmp_path).get("linear").config.max_batch_size == 8
    else:
        assert found[0].state == "READY", found
        assert opened(tmp_path).get("linear").config.max_batch_size == 0


def test_a_batch_that_nobody_declared(tmp_path: Path, opened: Any) -> None:
    """Checks that an ONNX file can be served with max_batch_size 1 even if its batch dim isn't named "batch". Also
    fails if a single row is padded to two rows, which costs twice as much."""
    for largest in (1, 4):
        folder = tmp_path / f"neg{largest}"
        (folder / "1").mkdir(parents=True)
        build.artifact(
            folder / "1" / "model.onnx",
            [build.node("Neg", "x", "y")],
            {"x": (FLOAT, ["N", 4])},
            {"y": (FLOAT, ["N", 4])},
        )
        (folder / "config.pbtxt").write_text(f"max_batch_size: {largest} dynamic_batching {{ }}")
    repository = opened(tmp_path)
    assert not reasons(repository)
    assert [repository.get(f"neg{largest}").scheduling.allowed for largest in (1, 4)] == [None, None]


@pytest.mark.parametrize("config", ["", "max_batch_size: 8", "max_batch_size: 8 dynamic_batching { }"])
def test_rows_that_share_a_scale_are_batched_only_on_request(tmp_path: Path, opened: Any, config: str) -> None:
    """Fails if a dynamic int8 model gets dynamic batching although its config lacks ``dynamic_batching``. Also checks
    that a config with ``dynamic_batching`` turns dynamic batching on. Also checks that a caller can send a batch."""
    folder = tmp_path / "int8"
    (folder / "1").mkdir(parents=True)
    build.artifact(
        folder / "1" / "model.onnx",
        [
            build.node("DynamicQuantizeLinear", "x", "q s z"),
            build.node("MatMulInteger", "q w z", "i"),
            build.node("Cast", "i", "f", to=FLOAT),
            build.node("Mul", "f s", "y"),
        ],
        {"x": (FLOAT, ["batch", 4])},
        {"y": (FLOAT, ["batch", 3])},
        {"w": np.ones((4, 3), np.int8)},
    )
    (folder / "config.pbtxt").write_text(config)
    model = opened(tmp_path).get("int8")
    assert model.config.HasField("dynamic_batching") == ("dynamic_batching" in config)
    assert model.config.max_batch_size >= 8
    linear(tmp_path / "float" / "1")
    assert opened(tmp_path).get("float").config.HasField("dynamic_batching")


def test_a_batch_below_the_declared() -> None:
    """Checks that the error for a too small max_batch_size contains max_batch_size and the model's smallest batch."""
    spec = TensorSpec("x", "float32", ("batch", 4))
    signature = Signature((spec,), (spec,), {"batch": DimRange(4, 8, 16)})
    config = model_config.parse("max_batch_size: 2", "config.pbtxt")
    with pytest.raises(BadRepository, match=r"max_batch_size 2 is below 4, .* --dim batch=1:8:16"):
        model_config.scheduling(config, signature)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("max_batch_size: oops", "can't read the config linear/config.pbtxt"),
        ('name: "other"', "has the name 'other'"),
        ('input { name: "z" data_type: TYPE_FP32 dims: [4] }', "no input 'z'"),
        (
            'max_batch_size: 4 input { name: "x" data_type: TYPE_INT32 dims: [4] }',
            "the config has the data type TYPE_INT32",
        ),
        ('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [5] }', "the config's dims are [5]"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [4] }',
            "the config's dims are [4], but the model's dims are [-1, 4]",
        ),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: [8] }", "preferred_batch_size has to be from 1"),
        ('default_model_filename: "../../secret.onnx"', "has to be a plain file name"),
        ('max_batch_size: 4 output { name: "y" label_filename: "../l" }', "has to be a plain file name"),
        ('backend: "python"', "pass --allow-python-backend"),
        ("version_policy { specific { versions: [7] } }", "version 7"),
        ('input { name: "x" optional: true }', "the input is optional but has no default"),
    ],
)
def test_a_config_that_contradicts_the_model(tmp_path: Path, opened: Any, config: str, says: str) -> None:
    """Checks that a config that contradicts its model is refused, that a good model in the same repository is served,
    and that the index gives the reason."""
    linear(tmp_path / "linear" / "1")
    linear(tmp_path / "good" / "1")
    (tmp_path / "linear" / "config.pbtxt").write_text(config)
    repository = opened(tmp_path)
    assert says in reasons(repository)["linear"]
    with pytest.raises(ServeError, match="no available versions") as caught:
        repository.get("linear")
    assert caught.value.code is Code.UNAVAILABLE
    assert scale(repository, "good") == 1


def test_a_model_by_another_name(tmp_path: Path, opened: Any) -> None:
    """Checks that the error names default_model_filename if the model file isn't called model.onnx. Also checks that
    the server loads the file that default_model_filename names."""
    linear(tmp_path / "linear" / "1").rename(tmp_path / "linear" / "1" / "net.onnx")
    assert "it has net.onnx: name it in config.pbtxt as default_model_filename" in reasons(opened(tmp_path))["linear"]
    (tmp_path / "linear" / "config.pbtxt").write_text('default_model_filename: "net.onnx"')
    assert not reasons(opened(tmp_path))


def test_how_a_config_schedules(tmp_path: Path, opened: Any) -> None:
    """Checks that each scheduling option of the config reaches the scheduler."""
    linear(tmp_path / "linear" / "1")
    (tmp_path / "linear" / "config.pbtxt").write_text(
        """
        max_batch_size: 16
        dynamic_batching {
          preferred_batch_size: [4, 8] max_queue_delay_microseconds: 500 priority_levels: 2 default_priority_level: 1
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 max_queue_size: 5 }
          priority_queue_policy { key: 2 value { max_queue_size: 3 allow_timeout_override: true } }
        }
        instance_group [{ count: 2 kind: KIND_CPU }]
        response_cache { enable: true }
        parameters { key: "threads" value { string_value: "1" } }
        """
    )
    found = opened(tmp_path).get("linear").scheduling
    assert (found.max_batch_size, found.preferred, found.max_delay_us) == (16, (4, 8), 500)
    assert (found.priority_levels, found.default_priority, found.instances, found.threads) == (2, 1, 2, 1)
    assert (found.default_policy.timeout_action, found.default_policy.timeout_us) == ("delay", 9)
    assert found.default_policy.max_queue_size == 5
    assert found.policies[2].max_queue_size == 3
    assert found.policies[2].allow_override
    assert found.dynamic
    assert found.response_cache


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["2", "10"]),
        ("version_policy { all {} }", ["1", "2", "10"]),
        ("version_policy { specific { versions: [1, 10] } }", ["1", "10"]),
    ],
)
def test_version_policies(tmp_path: Path, opened: Any, policy: str, versions: list[str]) -> None:
    """Checks that the served versions follow the version policy, and that the version with the highest number counts as
    the newest."""
    for version in (1, 2, 10):
        linear(tmp_path / "linear" / str(version), scale=version)
    (tmp_path / "linear" / "notes").mkdir()  # this folder name isn't a version
    (tmp_path / "linear" / "config.pbtxt").write_text(policy)
    repository = opened(tmp_path)
    assert [model.version for model in repository.versions("linear")] == versions
    assert scale(repository) == 10
    if "1" in versions:
        assert scale(repository, version="1") == 1


def test_an_openvino_model(tmp_path: Path, opened: Any) -> None:
    """Checks that an OpenVINO IR without a manifest is served, and that an IR that differs from its manifest is
    refused."""
    ov = pytest.importorskip("openvino")
    source = linear(tmp_path / "source")
    folder = tmp_path / "models" / "linear" / "1"
    folder.mkdir(parents=True)
    ov.save_model(ov.convert_model(str(source)), str(folder / "model.xml"), compress_to_fp16=False)
    repository = opened(tmp_path / "models")
    model = repository.get("linear")
    assert (model.config.platform, model.inputs["x"].shape) == ("openvino", (-1, 4))
    assert scale(repository) == 1
    files = {name: file_sha256(folder / name) for name in ("model.xml", "model.bin")}
    Manifest(kind="openvino", signature=model.signature, files=files).write(manifest_path(folder / "model.xml"))
    assert scale(opened(tmp_path / "models")) == 1
    weights = (folder / "model.bin").read_bytes()
    (folder / "model.bin").unlink()  # the server has mapped the old file into memory
    (folder / "model.bin").write_bytes(bytes(reversed(weights)))
    assert "not the file its manifest describes" in reasons(opened(tmp_path / "models"))["linear"]


def test_a_broken_new_version_leaves_the_old_one(tmp_path: Path, opened: Any) -> None:
    """Fails if a failed load, by command or by polling, removes the served version."""
    linear(tmp_path / "linear" / "1")
    repository = opened(tmp_path, mode="explicit", startup=["linear"])
    (tmp_path / "linear" / "2").mkdir()
    (tmp_path / "linear" / "2" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ServeError, match=r"version 2: .*not an ONNX file"):
        repository.load("linear")
    assert scale(repository) == 1
    states = {row.version: row.state for row in repository.index()}
    assert states == {"1": "READY", "2": "UNAVAILABLE"}
    linear(tmp_path / "linear" / "2", scale=2.0)
    repository.load("linear")
    assert scale(repository) == 2
    assert [model.version for model in repository.versions("linear")] == ["2"]


def test_a_probe_during_the_first_load(tmp_path: Path, opened: Any) -> None:
    """Fails if a probe that lists the models breaks while a model is loaded for the first time."""
    linear(tmp_path / "linear" / "1")
    repository = opened(tmp_path, mode="explicit")
    (tmp_path / "broken" / "1").mkdir(parents=True)
    with pytest.raises(ServeError):
        repository.load("broken")
    loading = threading.Thread(target=repository.load, args=("linear",))

    class Reasons(dict[str, str]):
        """A dict that starts loading the model ``linear`` when its values are first read. The first read waits up to a
        second for the model."""

        def values(self) -> Any:
            if loading.ident is None:
                loading.start()
                loading.join(1)
            return super().values()

    entry = repository._entries["broken"]
    entry.failed = Reasons(entry.failed)
    assert repository.broken() == ["broken"]
    loading.join(60)
    assert repository.loaded() == ["linear"]


def test_polling(tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if polling misses new, changed, broken or removed models, or retries an unchanged broken model."""
    linear(tmp_path / "linear" / "1")
    repository = opened(tmp_path, mode="poll", poll_seconds=3600)
    first = repository.get("linear")
    repository.poll_once()
    assert repository.get("linear") is first  # the model hasn't changed
    linear(tmp_path / "linear" / "1", scale=3.0)
    linear(tmp_path / "new" / "1")
    repository.poll_once()
    assert scale(repository) == 3
    assert scale(repository, "new") == 1
    (tmp_path / "new" / "1" / "model.onnx").write_bytes(b"half a mod")
    repository.poll_once()
    assert scale(repository, "new") == 1
    tried = []
    monkeypatch.setattr(repository, "_load", tried.append)
    repository.poll_once()
    assert tried == []  # the failed model hasn't changed since the failure
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "linear")
    repository.poll_once()
    with pytest.raises(ServeError) as caught:
        repository.get("linear")
    assert caught.value.code is Code.NOT_FOUND


def test_reloading_drops_no_request(tmp_path: Path, start: Start) -> None:
    """Fails if a request during repeated reloads is refused or answered wrongly."""
    linear(tmp_path / "linear" / "1")
    process = start(tmp_path, mode="explicit", models=("linear",))
    stop, failed, seen = threading.Event(), [], set()

    def ask() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
            given = triton.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.ones((1, 4), dtype=np.float32))
            while not stop.is_set():
                try:
                    y = client.infer("linear", [given]).as_numpy("y")
                except InferenceServerException as error:
                    failed.append(str(error))
                    return
                seen.add(round(float(y[0, 0] / WEIGHTS.sum(0)[0]), 2))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for scale_now in range(2, 9):
        linear(tmp_path / "linear" / "1", scale=float(scale_now))
        process.server.repository.load("linear")
        deadline = time.monotonic() + 30
        while float(scale_now) not in seen and not failed and time.monotonic() < deadline:
            time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert set(map(float, range(2, 9))) <= seen <= set(map(float, range(1, 9)))


def test_only_explicit_mode_takes_commands(tmp_path: Path, opened: Any) -> None:
    """Checks that a command can load or unload a model only if the server is in explicit mode."""
    linear(tmp_path / "linear" / "1")
    repository = opened(tmp_path)
    for call in (repository.load, repository.unload):
        with pytest.raises(ServeError, match="not allowed if polling is enabled") as caught:
            call("linear")
        assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("kind", ["empty", "truncated"])
def test_a_damaged_model_between_good_ones(tmp_path: Path, opened: Any, kind: str) -> None:
    """Fails if a damaged file breaks other models."""
    for name in ("a", "b", "c"):
        linear(tmp_path / name / "1")
    path = tmp_path / "b" / "1" / "model.onnx"
    path.write_bytes(b"" if kind == "empty" else path.read_bytes()[:60])
    repository = opened(tmp_path)
    assert set(reasons(repository)) == {"b"}
    assert repository.broken() == ["b"]
    assert scale(repository, "a") == scale(repository, "c") == 1
