"""Timing of models beside one another: paired blocks in child processes, statistics, energy, reports.

Takes candidates (an artifact, a runtime, session options) and their feeds. Returns a report with medians, percentiles,
speedups and confidence intervals, as JSON, Markdown or HTML.
"""
