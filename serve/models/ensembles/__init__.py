"""Ensembles: models that run other models as their steps.

In: an ensemble's config and the served models. Out: an executor that runs the steps.
"""
