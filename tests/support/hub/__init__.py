"""Provides a fake Hugging Face Hub, and the files of its cache, for tests."""
