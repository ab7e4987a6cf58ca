"""Measures candidates: defines the timed workload, times the candidates and the source together, and notes the noise.

Takes the candidates that passed the judge, and the user's batch, lengths and objective. Sets `measured` of each
candidate to its measured figures per request.
"""
