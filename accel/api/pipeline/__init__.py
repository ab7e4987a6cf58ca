"""Pipelines of several parts: the export and the optimization of each part, and the verification of the whole.

Takes an opened pipeline. Returns an artifact of kind ``pipeline``, or the result of ``accel.optimize``.
"""
