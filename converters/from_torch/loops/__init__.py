"""Turns loops over a dynamic length into scans, while ``torch.export`` traces a model.

In: the functions of a module's classes. Out: the same functions, with other code inside a ``with`` block.
"""
