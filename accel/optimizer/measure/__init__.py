"""The measurement of candidates: the timed workload, the timing beside the source, and notes about noise.

Takes the candidates that passed the judge, and the user's batch, lengths and objective. Gives each candidate its
`measured` figures, per request.
"""
