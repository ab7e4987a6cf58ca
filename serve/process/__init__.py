"""Runs a server's processes, and handles their options, signals, logs and changed files.

Reads `ServeOptions` from the command line, or as JSON from stdin. Runs one or several processes that serve until
SIGTERM.
"""
