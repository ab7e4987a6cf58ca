"""The models of ``benchmarks/zoo.py``, a module for each family.

A module has ``NAMES`` or a function ``names()``, and a function ``make(name)`` that returns a ``Case``.
"""
