"""Proves that ``accel plan`` and ``accel train`` refuse the same layouts, in the same words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accel.cli import group, run

_SHAPE = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 100, "seq": 32}
_CONFIGS = st.fixed_dictionaries(
    {
        "world": st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
        "global_batch": st.sampled_from([1, 2, 4, 5, 6, 8, 12, 16, 32, 48]),
        "micro_batch": st.sampled_from([1, 2, 3, 4]),
        "shape": st.fixed_dictionaries(
            {},
            optional={
                "params": st.sampled_from([3_000, 210_000, 7_000_000_000]),
                "layers": st.sampled_from([1, 2, 3]),
                "heads": st.sampled_from([1, 4, 5]),
                "kv_heads": st.sampled_from([1, 2, 3]),
                "seq": st.sampled_from([30, 64]),
            },
        ),
        "axes": st.fixed_dictionaries(
            {},
            optional={
                "zero": st.sampled_from([0, 1, 2, 3, 3, 3, 4]),
                "tp": st.sampled_from([1, 1, 2, 3, 4]),
                "pp": st.sampled_from([1, 1, 2, 3, 4, 8]),
                "cp": st.sampled_from([1, 1, 2, 4]),
                "cp_method": st.sampled_from(["ulysses", "ring", "star"]),
                "ep": st.sampled_from([1, 1, 1, 2]),
                "replicate": st.sampled_from([1, 2, 3]),
                "hpz": st.sampled_from([1, 2, 4, 8]),
                "qwz": st.just(True),
                "qgz": st.just(True),
                "offload": st.just(True),
                "disk": st.just("/states"),
                "disk_parameters": st.just(True),
                "recompute": st.sampled_from(["none", "selective", "full", "some"]),
                "pipeline": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "2f"]),
            },
        ),
        "precision": st.sampled_from(["fp32", "bf16", "O2", "fp16-only"]),
    }
)
_ONE = {"world": 4, "global_batch": 8, "micro_batch": 1, "shape": {}, "precision": "bf16"}


def _asked(line: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = run(group, [*line, "-q", "--json"])
    return code, capsys.readouterr().err


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_CONFIGS)
@example({**_ONE, "axes": {"zero": 3, "pp": 2}})
@example({**_ONE, "axes": {"zero": 3, "hpz": 4}})
@example({**_ONE, "axes": {"zero": 3, "disk_parameters": True}})
@example({**_ONE, "axes": {"zero": 3, "disk": "/states", "disk_parameters": True, "offload": True}})
@example({**_ONE, "global_batch": 2, "axes": {"pp": 2}})
@example({**_ONE, "axes": {"zero": 3, "hpz": 2, "qwz": True}})
@example({**_ONE, "shape": {"params": 7_000_000_000}, "axes": {}})
def test_both_commands_refuse_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: dict[str, Any]
) -> None:
    """Draws a layout and asks ``accel plan`` with options, ``accel plan`` with a config, and ``accel train --dry-run``.
    Fails if one of them accepts what another refuses, or gives another reason. If the reason names another batch, the
    layout with this batch may not be refused for its batch again."""
    shape, axes = {**_SHAPE, **asked["shape"]}, asked["axes"]

    def answers(global_batch: int, micro_batch: int) -> set[tuple[int, str]]:
        common = [f"--global-batch={global_batch}", f"--micro-batch={micro_batch}"]
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
        flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in axes.items()]
        keys = [f"--parallel.{name}={str(value).lower()}" for name, value in axes.items()]
        keys += [f"--shape.{name}={value}" for name, value in shape.items()]
        world, precision = str(asked["world"]), asked["precision"]
        (tmp_path / "empty.toml").write_text("")
        config = tmp_path / "config.toml"
        tables = {"parallel": axes, "shape": shape, "precision": {"mode": precision}, "optimizer": {"eps": 1e-4}}
        body = [f"global_batch = {global_batch}", f"micro_batch = {micro_batch}"]
        for name, table in tables.items():
            rows = [f"{k} = {str(v).lower() if v is True else repr(v)}" for k, v in table.items()]
            body += [f"[{name}]", *rows]
        config.write_text("\n".join(body))
        train = ["train", str(tmp_path / "empty.toml"), "--nproc", world, "--dry-run", "--out", str(tmp_path / "run")]
        return {
            _asked(["plan", *sizes, *common, *flags, "--precision", precision, "--world", world], capsys),
            _asked(["plan", str(config), "--world", world], capsys),
            _asked([*train, *common, *keys, f"--precision.mode={precision}", "--optimizer.eps=1e-4"], capsys),
        }

    found = answers(asked["global_batch"], asked["micro_batch"])
    assert len(found) == 1, found
    ((code, said),) = found
    assert code in (0, 2)
    batch = re.search(r"use (?:--micro-batch=(\d+) )?--global-batch=(\d+)", said)
    if batch is not None:
        ((_, again),) = answers(int(batch[2]), int(batch[1] or asked["micro_batch"]))
        assert "-batch=" not in again or "stages idle" in again != "stages idle" in said, (said, again)
