"""Configures Sphinx: ``make docs`` writes docs/_build/html, which opens offline."""

from __future__ import annotations

import sys
from pathlib import Path

from pygments.lexers import TextLexer
from sphinx.application import Sphinx

from accel import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "accel"
author = "the accel developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing"]  # allows links to files outside docs/, which a test checks
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = f"accel {version}"
html_show_sourcelink = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Allows code blocks named pbtxt, and regenerates the page of all messages."""
    from messages import page

    app.add_lexer("pbtxt", TextLexer)
    (HERE / "reference" / "messages.md").write_text(page(), encoding="utf-8")
