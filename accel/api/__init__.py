"""The public functions, one per file. The command line only parses options and calls these functions.

In: a ``Source`` (or its spec) and keywords. Out: an ``Artifact``, a session or a report with ``to_json``.
"""
