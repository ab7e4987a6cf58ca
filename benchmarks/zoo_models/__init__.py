"""The models of ``benchmarks/zoo.py``, with one module for each family.

Each module has a function ``make(name)`` that returns a ``Case``, and the names in ``NAMES`` or from ``names()``.
"""
