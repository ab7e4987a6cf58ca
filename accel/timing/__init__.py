"""Times several models in turn, in paired blocks that run in child processes. Also computes statistics, measures energy
and writes reports.

A candidate has an artifact, a runtime, session options and feeds. The report holds medians, percentiles, speedups and
confidence intervals, as JSON, Markdown or HTML.
"""
