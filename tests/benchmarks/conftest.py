"""Loads the script that a file of tests is about."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports the script whose path is ``SCRIPT`` in the test's file. Returns the module."""
    path = request.module.SCRIPT
    monkeypatch.syspath_prepend(str(path.parent))  # child processes import the script from this folder
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module
