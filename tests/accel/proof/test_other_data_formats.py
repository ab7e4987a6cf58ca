"""Proves that the advice for data in another format than .npz works when it is followed."""

from __future__ import annotations

import json
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.onnx_builder import FLOAT, artifact, node

ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


def write(path: Path) -> None:
    if path.suffix in (".csv", ".tsv"):
        np.savetxt(path, ROWS, delimiter="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"x": row.tolist()}) for row in ROWS) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps({"x": ROWS.tolist()}))
    else:
        safetensors.numpy.save_file({"x": ROWS}, path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".safetensors"])
@pytest.mark.parametrize("command", [("verify", "{m}", "{m}"), ("optimize", "{m}", "-o", "{m}_out")])
def test_data_in_another_format(cli: Any, tmp_path: Path, suffix: str, command: tuple[str, ...]) -> None:
    """Fails if the message speaks of pickles, or if the code in the message doesn't make a file that --data takes."""
    model = artifact(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 4])})
    data = tmp_path / f"it's mine{suffix}"
    write(data)
    words = [word.format(m=model.path) for word in command]
    ran = cli(*words, "--data", data, "-q")
    assert ran.code == 2
    assert "is not an .npz file, but --data takes .npz" in ran.stderr
    assert "pickle" not in ran.stderr
    code, _, named = ran.stderr.partition("convert it with ")[2].strip().partition(", with the input's name")
    assert bool(named) is ("INPUT" in code)
    exec(code.replace("INPUT", "x"), {"np": np, "json": json, "pathlib": pathlib, "safetensors": safetensors})
    with np.load(data.with_suffix(".npz")) as made:
        np.testing.assert_allclose(made["x"], ROWS, rtol=1e-6)
    if command[0] == "verify":
        assert cli(*words, "--data", data.with_suffix(".npz"), "-q").code == 0
