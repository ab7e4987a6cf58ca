"""Launches the ranks for ``test_distributed.py`` and ``test_planned_bytes.py``, which check the results.

The ranks are launched once for each world size, and run only the configs that the collected tests need. ``make test``
collects the configs of ``rows.FAST``, and ``make proof`` collects all other configs. An option such as ``-k "TP and
2"`` collects a few configs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.accel.train.parallel import launches

_OneWorker = Callable[[str], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def results(shared: Path, one_worker: _OneWorker, request: pytest.FixtureRequest) -> dict[int, dict[str, Any]]:
    """Returns the results of the ranks by world size. One pytest worker launches the ranks once, for all workers and
    all modules that need the results."""
    orders = launches.orders(request.session.items, Path(__file__).parent)
    folder = shared / "distributed"
    with one_worker("distributed"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            launches.launch(orders, folder)
            (folder / "done").touch()
    return launches.read(orders, folder)
