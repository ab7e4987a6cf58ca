"""Searches for a mixed precision: finds the layers that have to stay float so that all other layers can be int8.

Takes an int8 recipe and a judge. Returns the recipe with the layers that stay float, and the `Trajectory` of the
search.
"""
