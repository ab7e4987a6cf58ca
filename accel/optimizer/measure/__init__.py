"""The measurement of candidates: the workload they are timed on, the timing beside the source, and notes about noise.

In: candidates that the judge let pass, and the user's batch, lengths and objective. Out: each candidate's `measured`
figures, per request.
"""
