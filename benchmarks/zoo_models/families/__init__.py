"""Makes the models of libraries and files, with one module for each family. The models of ``zoo_models.own`` are ours.

In each module, ``make(name)`` returns a ``Case``. ``NAMES`` or ``names()`` has the names of the models.
"""
