"""Provides a Hugging Face Hub and its cache for tests."""
