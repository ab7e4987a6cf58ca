"""Writes the report of a run, which is the page `report.html`, and the command line that repeats the run.

Takes the candidates, with their judgements and figures, and the request. Writes one HTML file, which opens offline.
"""
