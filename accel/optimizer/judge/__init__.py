"""Judges how much worse a candidate is than the source, by a metric, by labels or by the outputs alone.

In: the source, the samples to judge on, a metric or labels. Out: a `Judgement` of each candidate, whose `drop` is
compared with the user's budget.
"""
