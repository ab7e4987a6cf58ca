"""Timing of models beside one another: paired blocks in child processes, statistics, energy, reports.

In: candidates (an artifact, a runtime, session options) and their feeds. Out: a report with medians, percentiles and
speedups with their confidence intervals, as JSON, Markdown or HTML.
"""
