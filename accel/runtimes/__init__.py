"""Runs models in different runtimes, with one file per runtime. ``base`` has the table of runtimes.

Takes an artifact and session options. Returns a session, which runs feeds (arrays by name) and returns outputs by name.
"""
