"""Judges how much less accurate a candidate is than the source, by a metric, by labels or by the outputs alone.

Takes the source, the samples to judge on, and a metric or labels. Returns a `Judgement` of each candidate. The `drop`
of a judgement is compared with the user's `max_drop`.
"""
