"""A Hugging Face Hub and its cache for tests."""
