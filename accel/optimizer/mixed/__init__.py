"""The search for mixed precision, which finds the layers that have to stay float so that all other layers can be int8.

In: an int8 recipe and a judge. Out: the recipe with the layers that stay float, and the `Trajectory` of the search.
"""
