"""Contains the public functions, one per file. The command line only parses options and calls these functions.

Each function takes a ``Source`` (or the spec of a source) and keyword arguments. Each function returns an ``Artifact``,
a session, or a report with the method ``to_json``.
"""
