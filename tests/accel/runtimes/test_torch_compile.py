"""Proves that torch.compile sessions give the same outputs as eager mode, and never run silently in eager mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel.artifact import Artifact
from accel.errors import BuildFailed, UnsupportedHere
from accel.progress import watched_by
from accel.runtimes.base import open_session
from accel.runtimes.torch_compile import TorchCompileSession
from accel.sources.source import Source

FACTORIES = """
import torch


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return {"score": torch.tanh(self.layer(x)), "total": x.sum(1)}


class Breaks(Mlp):
    def forward(self, x):
        x = self.layer(x)
        torch._dynamo.graph_break()
        return torch.relu(x)


class Skipped(Mlp):
    @torch._dynamo.disable
    def forward(self, x):
        return self.layer(x)


mlp, breaks, skipped = Mlp, Breaks, Skipped
"""


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """Returns a function that takes the name of a test model's factory, and opens this factory as a source."""
    file = tmp_path / "compiled_models.py"
    file.write_text(FACTORIES)

    def opened(name: str) -> Artifact:
        return Source(f"{file}:{name}", inputs=["x:float32[batch,4]"]).open()

    return opened


def test_it_computes_what_eager_computes_and_compiles_at_the_first_run(source: Any) -> None:
    """Fails if outputs lose their names or values, if nothing is compiled, or if every run compiles again."""
    model, said = source("mlp"), []
    with open_session(model, "torch") as eager, open_session(model, "torch-compile") as compiled:
        assert isinstance(compiled, TorchCompileSession)
        with watched_by(lambda message, _fraction: said.append(message)):
            for seed, batch in enumerate((3, 3, 5, 5, 6)):
                feeds = model.signature.example_inputs(seed=seed, batch=batch)
                wanted, found = eager.run(feeds), compiled.run(feeds)
                assert list(found) == list(wanted) == ["score", "total"]
                for name, value in wanted.items():
                    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
        assert said == ["torch.compile: compiling"] * 3  # torch compiles once for each batch size: 3, 5 and 6
        assert compiled.graph_breaks == 0


def test_graph_breaks_are_counted_and_told(source: Any) -> None:
    """Checks that graph breaks are counted and reported. After a graph break, code runs uncompiled."""
    said: list[str] = []
    with open_session(source("breaks"), "torch-compile") as session:
        with watched_by(lambda message, _fraction: said.append(message)):
            session.run(session.example_inputs())
        assert session.graph_breaks == 1
    assert "graph break" in said[-1]


def test_without_a_compiler_it_is_named(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a missing C++ compiler gives an error before the first run, without torch's traceback."""
    model = source("mlp")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnsupportedHere, match=r"needs the C\+\+ compiler g\+\+"):
        open_session(model, "torch-compile")


def test_a_compiler_that_fails_is_an_error(source: Any, tmp_path: Path) -> None:
    """Fails if a failed compilation falls back to eager, because bench would then report eager's time as
    torch.compile's. If the user has set suppress_errors, torch itself falls back to eager."""
    import torch._dynamo
    import torch._inductor

    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 13" && exit 0\necho "no space left" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    with (
        open_session(source("mlp"), "torch-compile") as session,
        torch._inductor.config.patch({"cpp.cxx": (str(compiler),), "force_disable_caches": True}),
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.raises(BuildFailed, match=r"failed on .*compiled_models\.py .*no space left") as caught,
    ):
        session.run(session.example_inputs(batch=7))
    assert "\n" not in str(caught.value)


def test_a_model_that_torch_does_not_compile_is_an_error(source: Any) -> None:
    """If torch compiles no part of a model, the run must raise an error. Otherwise, bench would report eager's time as
    torch.compile's time."""
    with open_session(source("skipped"), "torch-compile") as session, pytest.raises(UnsupportedHere, match="nothing"):
        session.run(session.example_inputs())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    """Fails if the session accepts a TorchScript model, which torch.compile can't compile."""
    path = tmp_path / "scripted.pt"
    module = torch.nn.Linear(4, 3)
    torch.jit.save(torch.jit.trace(module, torch.zeros(1, 4)), str(path))
    model = Source(path, inputs=["x:float32[batch,4]"]).open()
    with pytest.raises(UnsupportedHere, match="TorchScript"):
        open_session(model, "torch-compile")
