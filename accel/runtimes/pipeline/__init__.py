"""Runs pipelines, which consist of several artifacts and the function that calls them.

Takes an artifact of kind ``pipeline``. The artifact's file lists the function and the artifacts of the parts. Returns a
session that runs the function on the sessions of the parts.
"""
