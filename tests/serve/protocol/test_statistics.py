"""Proves that the statistics of several processes add up."""

from __future__ import annotations

from dataclasses import fields

from accel.serve.protocol.inference import DurationStatistic, Histogram, ModelStatistics


def filled(start: int) -> ModelStatistics:
    """Makes statistics in which every figure differs from its default and from the other figures."""
    made = ModelStatistics()
    for number, known in enumerate(fields(ModelStatistics), start):
        value = getattr(made, known.name)
        if isinstance(value, DurationStatistic):
            value.add(1000 * number, number)
        elif isinstance(value, Histogram):
            value.add(10**number, number)
        elif isinstance(value, dict):
            value[number] = tuple(DurationStatistic(number, 10 * number) for _ in range(3))
            value[1] = tuple(DurationStatistic(1, number) for _ in range(3))
        else:
            setattr(made, known.name, number)
    return made


def test_every_figure_is_added() -> None:
    """Checks that the sum of two processes' statistics contains every figure. The sum must also contain batch sizes
    that only one of the two processes has run. Also fails if the times of the last inference are added up."""
    total, more = filled(1), filled(7)
    total.add(more)
    one, two = filled(1), filled(7)
    for known in fields(ModelStatistics):
        mine, a, b = (getattr(found, known.name) for found in (total, one, two))
        if isinstance(mine, DurationStatistic):
            assert (mine.count, mine.ns) == (a.count + b.count, a.ns + b.ns)
        elif isinstance(mine, Histogram):
            assert mine.counts == [x + y for x, y in zip(a.counts, b.counts, strict=True)]
        elif isinstance(mine, dict):
            assert set(mine) == set(a) | set(b)
            assert [part.ns for part in mine[1]] == [x.ns + y.ns for x, y in zip(a[1], b[1], strict=True)]
        elif known.name == "last_inference_ms":
            assert mine == max(a, b)
        else:
            assert mine == a + b
    assert more == two
