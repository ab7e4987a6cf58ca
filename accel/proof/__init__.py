"""Proof that two versions of a model compute the same: gates, comparison, bisection, the chain of hashes, reproduction.

In: two artifacts and inputs (random, or the user's data). Out: differences, gate results, the first node that differs.
"""
