"""The tables that every part reads: kinds of models, stages, targets, limits. To add a thing is to add a row.

In: a name (a kind, a stage, a target). Out: its row, a frozen dataclass whose import strings are loaded at first use.
"""
