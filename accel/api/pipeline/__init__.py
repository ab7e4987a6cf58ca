"""Exports or optimizes each part of a pipeline, and verifies the whole pipeline.

The functions take an opened pipeline. They return an artifact of kind ``pipeline``, or the result of
``accel.optimize``.
"""
