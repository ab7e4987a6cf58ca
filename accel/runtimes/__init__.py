"""One file a runtime; ``base.py`` has the Session protocol and the table."""
