"""Proves that one table holds all error limits, with one value and one reason for each step and precision."""

from __future__ import annotations

from accel.tables import limits


def test_each_limit_is_one_row_with_a_reason() -> None:
    """Checks that each limit is in the table once, has a reason, and is between 0 and 1."""
    keys = [(row.step, row.form) for row in limits.TABLE]
    assert len(set(keys)) == len(keys)
    assert all(row.reason and "\n" not in row.reason and 0 < row.value <= 1 for row in limits.TABLE)


def test_a_bisection_has_the_limits_of_verify_but_for_its_own_rows() -> None:
    """Checks that a precision has the same limit in ``accel bisect`` and ``accel verify``. Only fp32 and "as-run" have
    limits of their own in ``accel bisect``."""
    assert limits.BISECT_LIMITS == {**limits.VERIFY_LIMITS, "fp32": 1e-4, "as-run": 0.1}
