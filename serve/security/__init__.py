"""The callers that the server accepts: bearer tokens with their models (`access`), TLS certificates (`tls`).

Reads a file of tokens, and PEM files. Makes `Access`, which checks each call, and an `ssl.SSLContext`.
"""
