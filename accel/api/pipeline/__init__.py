"""Exports or optimizes each part of a pipeline, and verifies the whole pipeline.

Each function takes an opened pipeline, and returns an artifact of kind ``pipeline``, or the result of
``accel.optimize``.
"""
