"""Proves that conditions on sizes are evaluated as Python evaluates them, and that nothing else is evaluated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidModel
from accel.signature.conditions import Condition, broken

TEXTS = ["n <= 512", "((31 + n) // 32) == 1", "min(512, n) == n", "(n % 7) != 0 and n + m < 40", "not n > max(m, 3)"]


@given(st.sampled_from(TEXTS), st.integers(0, 1000), st.integers(0, 60))
def test_as_python(text: str, n: int, m: int) -> None:
    """Fails if a condition has another value than in Python."""
    assert Condition.parse(text).holds({"n": n, "m": m}) == eval(text, {"n": n, "m": m})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "n.__class__",
        "[n for n in (1,)]",
        "n ** 9 ** 9 ** 9",
        "open(n)",
        "'a' == n",
        "1.5 < n",
        "lambda: n",
        "(n",
        "",
        "(" * 900 + "n" + ")" * 900,
        "n" + " + n" * 1000,
        "n\x00",
    ],
)
def test_a_hostile_text_is_not_evaluated(text: str) -> None:
    """Fails if a manifest's text is run as Python, takes long, or isn't refused in one sentence."""
    with pytest.raises(InvalidModel, match="export the model again"):
        Condition.parse(text)
    assert not Condition.allows(text)


def test_a_condition_on_another_dim_is_skipped() -> None:
    """Fails if a condition is taken for broken because its dim isn't in the sizes."""
    assert broken([Condition.parse("m < 3"), Condition.parse("n % m == 0")], {"n": 5}) is None
    found = broken([Condition.parse("n % m == 0")], {"n": 5, "m": 0})
    assert found is not None
    assert found.text == "n % m == 0"
