"""Contains the code that the tests share: builders of models and files, servers, fakes and a browser. ``ROOT`` is the
repository's root."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
