"""Proves that the copy of a live module computes the same as the module, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accel
from accel.child import Child
from accel.errors import BadSource

X = torch.arange(8.0).reshape(2, 4)


def test_changed_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Fails if another process runs the changed code on disk instead of the live module's code."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = tmp_path / "net_that_changes.py"
    code.write_text("import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): return x * 2\n")
    import net_that_changes  # type: ignore[import-not-found]

    source = accel.Source(net_that_changes.Net(), example=(torch.ones(2, 2),))
    code.write_text("import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): return x * 20\n")
    with pytest.raises(BadSource, match="restart Python if a file was edited"):
        Child("accel.api.load:load", {"model": source.text})


def test_changed_values_of_imported_modules_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Fails if another process runs a module with the values on disk instead of those of the user's process, if the
    message says only that a file was edited, or if the advice doesn't work."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "values_that_change.py").write_text("K = 2.0\n")
    (tmp_path / "net_of_values.py").write_text(
        "import torch\nimport values_that_change\nclass Net(torch.nn.Module):\n    k = None\n"
        "    def forward(self, x): return x * (self.k or values_that_change.K)\n"
    )
    import net_of_values  # type: ignore[import-not-found]
    import values_that_change  # type: ignore[import-not-found]

    monkeypatch.setattr(values_that_change, "K", 9.0)
    model = net_of_values.Net()
    with pytest.raises(BadSource, match="value of an imported Python module was changed at run time, make the value"):
        Child("accel.api.load:load", {"model": accel.Source(model, example=(X,)).text})
    model.k = values_that_change.K
    with Child("accel.api.load:load", {"model": accel.Source(model, example=(X,)).text}) as child:
        torch.testing.assert_close(torch.from_numpy(child.call("run", feeds={"x": X.numpy()})["output"]), X * 9)


def test_a_parametrized_module_still_runs() -> None:
    """Accel copies a module and removes the copy's parametrizations. Fails if the user's own module loses its
    parametrizations."""
    net = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    before = net(X)
    accel.Source(net, example=(X,)).open()
    torch.testing.assert_close(net(X), before)
