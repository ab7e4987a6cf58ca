"""Exports decoders with a KV cache, and generates text with them. Takes sources and folders of decoders. Gives folders
and tokens.
"""
