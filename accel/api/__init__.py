"""The public functions, one in a file. The command line only parses its options and calls them.

In: a ``Source`` (or its spec) and keywords. Out: an ``Artifact``, a session or a report with ``to_json``.
"""
