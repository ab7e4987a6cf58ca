"""The report of a run: the page `report.html` from its template, and the command line that repeats the run.

Takes the candidates, with their judgements and figures, and the request. Writes one HTML file, which opens offline.
"""
