"""Proves that tables become plain text."""

from __future__ import annotations

import pytest
from rich.table import Table

from accel.timing.columns import as_text


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_text_has_no_escape_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the text of a table holds colors because the terminal can show them."""
    monkeypatch.setenv(name, "1")
    table = Table(title="[red]times[/red]")
    table.add_column("model", style="bold")
    table.add_row("a")
    assert "\x1b" not in as_text(table)
    assert "times" in as_text(table)
