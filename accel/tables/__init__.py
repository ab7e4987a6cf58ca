"""Holds the tables of model kinds, stages, targets, precisions and limits. To add a kind, a stage or a target, start
with a new row in its table.

Each row is a frozen dataclass and is found by its name. A row contains import strings of functions, and accel loads a
function when it is first used.
"""
