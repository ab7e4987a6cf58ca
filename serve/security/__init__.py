"""Decides which callers the server accepts, by bearer tokens (`access`) and TLS certificates (`tls`).

Reads a token file and PEM files. Makes `Access`, which checks each call, and an `ssl.SSLContext`.
"""
