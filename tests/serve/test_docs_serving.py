"""Proves that the configs, requests and commands of docs/how-to/serving.md work as written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from accel.serve.models import config as model_config
from accel.serve.protocol import messages as proto
from tests.support import ROOT
from tests.support.serving import WEIGHTS, linear, routes, tensor

# test_four_commands.py covers the four commands above the heading "Files for the examples".
HEADING = "\n## Files for the examples\n"
PAGE = HEADING + (ROOT / "docs" / "how-to" / "serving.md").read_text(encoding="utf-8").partition(HEADING)[2]
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for block in BLOCKS for line in block.splitlines()]
TO_MAKE, TO_RUN = COMMANDS[:5], COMMANDS[5:]  # the first five commands make the files for the examples


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the example files of serving.md with the script, commands and code blocks in serving.md."""
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl isn't installed")
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", section("Files for the examples"), re.DOTALL)
    (tmp_path / "make_models.py").write_text(script)
    for make in TO_MAKE:
        words = [sys.executable if word == "python" else word for word in shlex.split(make)]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
    written = re.findall(r"```(?:pbtxt|toml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert {name for name, _ in written} == {
        *(f"models/{name}/config.pbtxt" for name in ("scores", "text", "counter", "both")),
        "tokens.toml",
    }
    for name, text in written:
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_configs(folder: Path, start: Any) -> None:
    """Checks that the server accepts each config in serving.md, and that each config has the documented effect."""
    process = start(folder / "models")
    x = np.array([[1, -2, 0.5, 3]], np.float32)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        given = [tensor("x", x, "FP32")]
        found = [client.infer("scores", given, priority=1, timeout=10_000_000).as_numpy("y") for _ in range(2)]
        np.testing.assert_allclose(found[0], x @ WEIGHTS, rtol=1e-5)
        np.testing.assert_array_equal(found[0], found[1])
        statistics = client.get_inference_statistics("scores").model_stats[0]
        assert statistics.inference_stats.cache_hit.count == 1
        assert statistics.inference_count == 1
        config = client.get_model_config("scores").config
        assert (config.instance_group[0].count, list(config.dynamic_batching.preferred_batch_size)) == (2, [4, 8])
        scheduling = process.server.repository.get("scores").scheduling
        assert (scheduling.threads, scheduling.queue_rows, scheduling.queue_bytes) == (1, 1024, 64 << 20)
        assert scheduling.policies[1].max_queue_size == 16

        for length in (2, 5):  # the requests leave out the attention mask
            ids = np.arange(length, dtype=np.int64)[None]
            np.testing.assert_array_equal(client.infer("text", [tensor("ids", ids, "INT64")]).as_numpy("y"), 2 * ids)
        lengths = process.server.repository.get("text").scheduling.lengths
        assert (lengths.dim, lengths.mask, lengths.pad, lengths.grouped) == (
            "length",
            "attention_mask",
            {"ids": 1},
            True,
        )

        totals = [
            client.infer(
                "counter", [tensor("x", np.full((1, 1), n, np.float32), "FP32")],
                sequence_id=7, sequence_start=n == 1, sequence_end=n == 3,
            ).as_numpy("total").item()
            for n in (1, 2, 3)
        ]  # fmt: skip
        assert totals == [1, 3, 6]
        assert [t.name for t in client.get_model_metadata("counter").inputs] == ["x"]

        best = client.infer("both", [tensor("image", -x, "FP32")]).as_numpy("best")
        np.testing.assert_allclose(best, np.maximum(-x @ WEIGHTS, 0), rtol=1e-5)


def test_the_commands(folder: Path, cli: Any, serve: Any) -> None:
    """Checks that each command in serving.md works as written on free ports, and that the tokens in serving.md have the
    documented rights."""
    check, begin, infer = map(shlex.split, TO_RUN)
    ran = cli(*check[1:])
    assert ran.code == 0, ran.stdout + ran.stderr
    assert all(name in ran.stdout for name in ("scores", "text", "counter", "both", "relu"))
    served = serve(*begin[2:])
    address = f"127.0.0.1:{served.wait_for('serving')['ports']['grpc']}"
    ran = cli(*infer[1:], "--url", address, "--json", "-q")
    assert ran.code == 0, ran.stderr
    found = np.reshape(json.loads(ran.stdout)["outputs"]["y"]["data"], (2, 3))
    np.testing.assert_allclose(found, np.ones((2, 4)) @ WEIGHTS, rtol=1e-5)
    for words, says in (
        (["counter" if word == "scores" else word for word in infer], "the token 'web' doesn't allow model 'counter'"),
        (["wrong" if word == "secret" else word for word in infer], "a valid token"),
    ):
        ran = cli(*words[1:], "--url", address, "-q")
        assert ran.code == 1
        assert says in ran.stderr
    operator = {"headers": {"authorization": "Bearer also-a-secret"}}
    pems = {"root_certificates": "ca.pem", "private_key": "client.key", "certificate_chain": "client.pem"}
    with triton.InferenceServerClient(address, ssl=True, **pems) as client:
        assert len(client.get_model_repository_index(**operator).models) == 5
        assert client.get_log_settings(**operator)
    assert served.end() == 0


def test_every_field_is_on_the_page() -> None:
    """Fails if serving.md leaves out a field of the protocol's ModelConfig message or one of accel's own parameters."""
    said = set(re.findall(r"`([a-z_A-Z.]+)`", section("config.pbtxt")))
    fields = {field.name for field in proto.message("ModelConfig").DESCRIPTOR.fields}
    assert fields <= said, fields - said
    ours = {
        model_config.LENGTH_DIM, model_config.LENGTH_MASK, f"{model_config.LENGTH_PAD}.INPUT", model_config.THREADS,
        model_config.LENGTH_GROUPING, model_config.QUEUE_ROWS, model_config.QUEUE_BYTES,
    }  # fmt: skip
    assert ours <= said, ours - said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('batch_input { target_name: "n" data_type: TYPE_INT32 source_input: "x" }', "batch_input"),
        ('batch_output { target_name: "y" source_input: "x" }', "batch_output"),
        ('model_operations { op_library_filename: "ops.so" }', "model_operations"),
        ('model_repository_agents { agents { name: "checksum" } }', "model_repository_agents"),
        ('backend: "python"', "Python code"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [4] reshape { shape: [2, 2] } }', "the config's reshape"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, cli: Any, text: str, says: str) -> None:
    """Checks that a config that requests an unsupported feature is refused, and that the error names the feature."""
    linear(tmp_path / "models" / "linear" / "1")
    (tmp_path / "models" / "linear" / "config.pbtxt").write_text(text)
    ran = cli("serve", tmp_path / "models", "--check", "--json")
    assert ran.code == 1
    assert says in ran.stdout


def test_the_table_of_endpoints() -> None:
    """Fails if the table of HTTP endpoints in serving.md differs from the server's routes."""
    rows = re.findall(r"^\| (GET|POST) \| `([^`]+)` \|", section("HTTP endpoints"), re.MULTILINE)
    whole = {(method, re.sub(r"[\[\]]", "", path)) for method, path in rows}
    short = {(method, re.sub(r"\[.*?\]", "", path)) for method, path in rows}
    assert whole | short == routes()
