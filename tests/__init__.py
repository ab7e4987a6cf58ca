"""The tests: folders mirror the source; what several of them share is in ``tests.support``."""
