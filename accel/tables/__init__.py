"""The tables of kinds of models, stages, targets, precisions and limits. Adding a kind, a stage or a target starts with
a row.

In: the name of a row. Out: the row, a frozen dataclass whose import strings are loaded at first use.
"""
