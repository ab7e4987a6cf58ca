"""Decides which callers the server accepts, by bearer tokens (`access`) and TLS certificates (`tls`).

Reads a token file and PEM files. Makes an `Access` object, which checks each call. Also makes the server's
`ssl.SSLContext`.
"""
