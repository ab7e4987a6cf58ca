"""Collects every error message of the source for the page "Messages", with … in place of values. Prints the page if it
runs as a script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("accel", "converters", "kernels", "serve")
HEAD = """# Messages

This page lists every error message of accel, sorted by the class of the error. `…` replaces a value. Search this
page for the words of your error message. [Troubleshooting](../troubleshooting.md) explains each class of error.
"""


def _text(node: ast.expr) -> str:
    """Returns the message of an expression, or an empty string if the expression is not a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return f"{_text(node.left)}{_text(node.right)}"
    return ""


def messages() -> Iterator[tuple[str, str]]:
    """Yields the class and the text of each error that the source raises with a literal message."""
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            if part == "accel" and path.relative_to(ROOT / part).parts[0] in PARTS:
                continue  # a link to another part
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                    continue
                name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
                text = max((_text(argument) for argument in node.exc.args), key=len, default="").strip(" ;:,")
                if name and len(text.replace("…", "")) > 12:
                    yield name, text


def page() -> str:
    """Returns the page as Markdown."""
    found: dict[str, set[str]] = {}
    for name, text in messages():
        found.setdefault(name, set()).add(" ".join(text.split()))
    lines = [HEAD]
    for name in sorted(found):
        lines += [f"## {name}", "", *(f"- `` {text.replace('`', '')} ``" for text in sorted(found[name])), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
