"""Makes the models of ``benchmarks/zoo.py``, with one module for each family.

In each module, ``make(name)`` returns a ``Case``. ``NAMES`` or ``names()`` has the names of the models.
"""
