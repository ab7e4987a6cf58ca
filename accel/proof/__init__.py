"""Checks that two versions of a model compute the same results, with gates, comparison, bisection, a chain of hashes,
and reproduction.

Takes two artifacts and inputs. The inputs are random or come from the user's data. Returns differences, results of
gates, and the first node that differs.
"""
