"""Makes models of libraries, and reads model files. Each module makes one family.

In each module, ``make(name)`` returns a ``Case``. ``NAMES`` or ``names()`` has the names of the models.
"""
