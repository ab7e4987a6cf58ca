"""The operating system's side of a server: options, processes and their supervisor, signals, logs, renewed files.

Reads `ServeOptions` from the command line, or as JSON from stdin. Runs one or several processes that serve until
SIGTERM.
"""
