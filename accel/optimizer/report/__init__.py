"""The report of a run: the page `report.html` from its template, and the command line that asks for the run again.

In: the candidates with judgements and figures, and the request. Out: one HTML file that loads nothing from elsewhere.
"""
