"""``accel.Source`` holds a model and everything that the user declares about the model. Proves that every public
function accepts a ``Source``."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.artifact import Artifact
from accel.errors import AccelError, UsageError
from accel.sources.source import Source, SourceOptions, shared

FUNCTIONS = ("export", "optimize", "bench", "verify", "bisect", "load", "preflight", "inspect")
NET = "import torch\n\ndef make():\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_takes_the_same(name: str) -> None:
    """Checks that every public function accepts the fields of ``Source`` as keywords, and refuses a misspelled
    keyword."""
    from accel.api.bisect import bisect
    from accel.api.preflight import preflight

    function = {"bisect": bisect, "preflight": preflight}.get(name) or getattr(accel, name)
    assert set(SourceOptions.__annotations__) == {field.name for field in fields(Source)} - {"spec"}
    assert inspect.signature(function).parameters["about"].annotation == "Unpack[SourceOptions]"
    assert not set(inspect.signature(function).parameters) & set(SourceOptions.__annotations__)
    wrong: Any = {"inptus": ["x:float32[1]"]}
    needed = {"out": "x.onnx", "target": "ort-cpu", "candidate": "x.onnx"}
    given = {n: v for n, v in needed.items() if n in inspect.signature(function).parameters}
    with pytest.raises((TypeError, AccelError), match="inptus"):
        function(["net.py:make"] if name == "bench" else "net.py:make", **given, **wrong)


def test_any_object_with_a_path(tmp_path: Path) -> None:
    """Fails if accel takes an object's text instead of its path. ``os.PathLike`` promises only a path."""

    class Place:
        def __fspath__(self) -> str:
            return str(tmp_path / "net.onnx")

    assert Source(Place()).text == str(tmp_path / "net.onnx")  # type: ignore[arg-type]


def test_a_source_is_taken_wherever_a_path_is(tmp_path: Path) -> None:
    """Checks that a Source can be exported, loaded and compared. A keyword of the call must not override a field of the
    Source."""
    (tmp_path / "net.py").write_text(NET)
    net = accel.Source(f"{tmp_path / 'net.py'}:make", inputs=["x:float32[batch,3]"])
    made = accel.export(net, out=tmp_path / "net.onnx", inputs=["other:float32[batch,9]"])
    assert [spec.name for spec in made.signature.inputs] == ["x"]
    assert accel.verify(net, accel.Source(made.path)).passed
    with accel.load(net) as session:
        assert session.run(session.example_inputs(batch=2))["output"].shape == (2, 2)


def test_of(digits: Artifact) -> None:
    """Fails if Source.of changes a path, an artifact or a source, or if keywords override the fields of a source."""
    assert Source.of("net.py:make", dims={"batch": (1, 2, 3)}) == Source("net.py:make", dims={"batch": (1, 2, 3)})
    assert Source.of(digits).open() is digits
    own = Source("net.py:make", weights="own.pt")
    assert Source.of(own) == own
    assert Source.of(own, weights="other.pt", signature="s") == Source("net.py:make", weights="own.pt", signature="s")


def test_shared_options_go_where_they_belong(digits: Artifact, tmp_path: Path) -> None:
    """If a call compares an ONNX file with a model factory, options such as ``inputs`` must apply only to the factory.
    Also checks that accel refuses an option that fits neither the file nor the factory."""
    (tmp_path / "net.py").write_text(NET)
    spec = f"{tmp_path / 'net.py'}:make"
    file, net = shared((digits.path, spec), {"inputs": ["x:float32[batch,3]"], "signature": ""})
    assert (file.inputs, net.inputs) == (None, ["x:float32[batch,3]"])
    assert (file.native, net.native) == (False, True)
    with pytest.raises(UsageError, match="takes signature=; leave out the option"):
        shared((digits.path, spec), {"signature": "serving_default"})
