"""The runtimes, one file per runtime. ``base`` has the table of runtimes.

In: an artifact and session options. Out: a session that runs feeds (arrays by name) and returns outputs by name.
"""
