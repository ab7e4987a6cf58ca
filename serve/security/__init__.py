"""The callers that the server accepts: bearer tokens with their models (`access`), TLS certificates (`tls`).

In: a file of tokens and PEM files. Out: `Access`, which checks each call, and an `ssl.SSLContext`.
"""
