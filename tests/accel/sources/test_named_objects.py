"""Proves that a message about a missing name tells the names that work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import accel
from accel.errors import BadSource

NET = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x):
        return self.linear(x)
"""
FACTORIES = """\
from pathlib import Path
from torch import nn
from the_users_net import Net

def make(width=3):
    return Net(width)

ready = Net()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "the_users_net.py").write_text(NET)
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


def test_imported_classes_of_the_user_are_named(path: Path) -> None:
    """Fails if the list of names leaves out one that works, or has a name of an installed package."""
    with pytest.raises(BadSource, match=r"NAME is one of these: (.*)$") as found:
        accel.load(f"{path}:other")
    names = str(found.value).rpartition(": ")[2].split(", ")
    assert names == ["Net", "make", "ready"]
    for name in names:
        with accel.load(f"{path}:{name}", inputs=["x:float32[batch,3]"]) as session:
            assert session.signature.outputs[0].shape == ("batch", 2)


def test_arguments_of_a_factory(path: Path) -> None:
    """Fails if a factory with arguments gets a list of names only, or if the advice doesn't work."""
    with pytest.raises(BadSource, match="write a function without arguments that returns") as found:
        accel.load(f"{path}:make(width=5)")
    (call,) = re.findall(r"that returns (.*\)), and", str(found.value))
    path.write_text(f"{FACTORIES}\ndef wide():\n    return {call}\n")
    with accel.load(f"{path}:wide", inputs=["x:float32[batch,5]"]) as session:
        assert session.signature.outputs[0].shape == ("batch", 2)
