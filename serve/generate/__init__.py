"""Generates tokens on the server: turns a model that outputs logits into a session that streams one token at a time.

Reads the parameters `stream_*` of the model's config, and adds the method `stream(feeds)` to the model's session.
"""
