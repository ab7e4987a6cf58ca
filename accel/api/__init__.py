"""The public functions, one per file. The command line only parses options and calls these functions.

A function takes a ``Source``, or the spec of a source, and keywords. It returns an ``Artifact``, a session, or a report
with ``to_json``.
"""
