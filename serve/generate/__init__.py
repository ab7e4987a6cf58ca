"""Generation of tokens on the server: a model that gives logits becomes a session that streams one token at a time.

In: a session, its signature and the parameters `stream_*` of its config. Out: a session with `stream(feeds)`.
"""
