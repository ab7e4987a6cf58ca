"""Generation of tokens on the server: a model that gives logits becomes a session that streams one token at a time.

Reads the parameters `stream_*` of the model's config, and wraps a session as a session with `stream(feeds)`.
"""
