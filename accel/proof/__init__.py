"""Proof that two versions of a model compute the same: gates, comparison, bisection, the chain of hashes, reproduction.

Takes two artifacts, and inputs that are random or the user's data. Returns differences, results of gates, and the first
node that differs.
"""
