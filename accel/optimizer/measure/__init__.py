"""The measurement of candidates: the timed workload, the timing beside the source, and notes about noise.

In: candidates that passed the judge, and the user's batch, lengths and objective. Out: each candidate's `measured`
figures, per request.
"""
