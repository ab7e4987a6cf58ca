"""The report of a run: the page `report.html` from its template, and the command line that repeats the run.

In: the candidates with judgements and figures, and the request. Out: one HTML file without external resources.
"""
