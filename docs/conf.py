"""Configures Sphinx: ``make docs`` writes docs/_build/html, which opens offline."""

from __future__ import annotations

import sys
from pathlib import Path

import click
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
suppress_warnings = ["myst.xref_missing"]  # without this line, Sphinx warns about links to files outside docs/
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
smartquotes = False  # Smart quotes would turn the two hyphens of an option into an en dash.
autodoc_typehints = "none"  # The signature of a function already shows the types of its arguments.
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = f"accel {version}"
html_show_sourcelink = False
html_copy_source = False


def whole_metavars(_: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Restores the last bracket of metavars such as ``NAME:DTYPE[DIM,...]``, because sphinx-click cuts this bracket
    off."""
    for option in context.command.params:
        cut = (option.metavar or "").lstrip("<[{($").rstrip(">]})$")  # sphinx-click strips these brackets
        if isinstance(option, click.Option) and option.metavar and cut != option.metavar:
            head = f".. option:: {', '.join(option.opts)} <"
            lines[:] = [f"{head}{option.metavar}>" if line == f"{head}{cut}>" else line for line in lines]


def setup(app: Sphinx) -> None:
    """Allows code blocks named pbtxt, completes the metavars of options, and regenerates the page of all messages."""
    from messages import page

    app.add_lexer("pbtxt", TextLexer)
    app.connect("sphinx-click-process-options", whole_metavars)
    (HERE / "reference" / "messages.md").write_text(page(), encoding="utf-8")
