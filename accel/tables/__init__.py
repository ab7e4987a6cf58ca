"""The tables: kinds of models, stages, targets, precisions and limits. Adding a kind, a stage or a target starts with a
row.

Takes the name of a row. Returns the row, a frozen dataclass whose import strings are loaded at first use.
"""
