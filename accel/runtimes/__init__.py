"""The runtimes, a file each. ``base`` has their table.

In: an artifact and session options. Out: a session that runs feeds (arrays by name) and returns outputs by name.
"""
