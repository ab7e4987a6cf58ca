"""Proves that a model runs its warm-up samples before the model is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.serve.models import loading
from tests.support.serving import Start, linear

SAMPLE = """
max_batch_size: 8
model_warmup [ { name: "three" batch_size: 3 count: 2
  inputs { key: "INPUT" value { data_type: TYPE_FP32 dims: [4] VALUES } } } ]
"""


class Watched:
    """A session that records the inputs of its runs."""

    def __init__(self, session: Any, seen: list[Any]) -> None:
        self._session, self._seen = session, seen

    def run(self, feeds: Any) -> Any:
        self._seen.append(feeds["x"])
        return self._session.run(feeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that records every input of every session that is opened from now on."""
    found: list[Any] = []
    real = loading.open_session
    monkeypatch.setattr(loading, "open_session", lambda *words: Watched(real(*words), found))
    return found


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("", [1, 8]),
        ("instance_group [ { count: 2 } ]", [1, 8, 1, 8]),
        (SAMPLE.replace("INPUT", "x").replace("VALUES", "random_data: true"), [3, 3]),
        (SAMPLE.replace("INPUT", "x").replace("VALUES", "zero_data: true"), [3, 3]),
    ],
)
def test_it_happens_before_the_model_is_ready(
    tmp_path: Path, start: Start, seen: list[Any], config: str, sizes: list[int]
) -> None:
    """Checks that each instance runs exactly its warm-up samples before the server is ready. The samples come from the
    config. If the config has no samples, the instance runs the smallest and the largest batch."""
    linear(tmp_path / "models" / "linear" / "1")
    (tmp_path / "models" / "linear" / "config.pbtxt").write_text(config)
    start(tmp_path / "models")
    assert [len(x) for x in seen] == sizes
    if "zero_data" in config:
        assert not any(x.any() for x in seen)
    if "random_data" in config:
        assert all(x.any() for x in seen)


def test_a_sample_from_a_file(tmp_path: Path, start: Start, seen: list[Any]) -> None:
    """Fails if the warm-up runs other values than those in the file."""
    linear(tmp_path / "models" / "linear" / "1")
    text = SAMPLE.replace("INPUT", "x").replace("VALUES", 'input_data_file: "values"')
    (tmp_path / "models" / "linear" / "config.pbtxt").write_text(text)
    (tmp_path / "models" / "linear" / "warmup").mkdir()
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "models" / "linear" / "warmup" / "values").write_bytes(values.tobytes())
    start(tmp_path / "models")
    np.testing.assert_array_equal(seen[0], values)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("x", 'input_data_file: "x.bin"', "the warm-up file warmup/x.bin can't be read"),
        ("x", 'input_data_file: "../x.bin"', "has to be a plain file name"),
        ("x", 'input_data_file: "short"', "doesn't fit the input 'x'"),
        ("z", "random_data: true", "lacks the input 'x'"),
    ],
)
def test_a_sample_that_cannot_be_run(
    tmp_path: Path, start: Start, seen: list[Any], name: str, values: str, says: str
) -> None:
    """Fails if a model is ready although its warm-up failed, or if the index lacks the reason for the failure."""
    linear(tmp_path / "models" / "linear" / "1")
    linear(tmp_path / "models" / "other" / "1")
    text = SAMPLE.replace("INPUT", name).replace("VALUES", values)
    (tmp_path / "models" / "linear" / "config.pbtxt").write_text(text)
    (tmp_path / "models" / "linear" / "warmup").mkdir()
    (tmp_path / "models" / "linear" / "warmup" / "short").write_bytes(b"abc")
    process = start(tmp_path / "models")
    rows = {row.name: (row.state, row.reason) for row in process.server.repository.index()}
    assert rows["other"][0] == "READY"
    state, reason = rows["linear"]
    assert state == "UNAVAILABLE"
    assert says in reason
