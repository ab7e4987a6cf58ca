"""The operating system's side of a server: options, processes and their supervisor, signals, logs, renewed files.

In: `ServeOptions`, from the command line or as JSON on stdin. Out: one or several processes that serve until SIGTERM.
"""
