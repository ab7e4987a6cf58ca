"""Proves that messages only name existing options, arguments, commands, extras, environment variables, pages and Python
names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import accel
from accel.cli import COMMANDS, group
from accel.sources.source import SourceOptions
from accel.spelling import ARGUMENTS, SWITCHES, flag
from tests.support import ROOT

PARTS = ("accel", "converters", "kernels", "serve")
# FOREIGN holds options of pip, Megatron and curl that accel's messages mention.
FOREIGN = {"--force-reinstall", "--no-deps", "--ckpt-format", "--cacert", "--data-binary"}
# The arguments in PYTHON_ONLY have no command-line option, because they describe models in memory.
PYTHON_ONLY = {"call", "dynamic", "example"}
# Matches an option of a command. The pattern doesn't match config keys, which `accel train` takes as --table.key=value.
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w.=-])")


@cache
def strings() -> tuple[tuple[Path, int, str], ...]:
    """Returns every string in the source except docstrings, with its file and line. In an f-string, ``…`` replaces each
    inserted value."""
    return tuple((path.relative_to(ROOT), line, text) for path, tree in sources() for line, text in _strings_of(tree))


@cache
def sources() -> tuple[tuple[Path, ast.Module], ...]:
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    links = {ROOT / "accel" / part for part in PARTS}
    own = [path for path in files if not links & set(path.parents)]
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in own)


def _strings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    inside = {
        part
        for node in ast.walk(tree)
        for part in (
            ast.walk(node.value) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ()
        )
    }
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yields ``command`` and all of its subcommands, each with its full name on the command line."""
    yield name, command
    if isinstance(command, click.Group):
        for one in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), one)
            assert found is not None
            yield from commands(found, f"{name} {one}")


@cache
def options_of_commands() -> dict[str, set[str]]:
    """Returns the options of each command."""
    return {
        name: {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
        | {"--help", "--version"}
        for name, command in commands(group, "accel")
    }


def arguments_of_functions() -> set[str]:
    """Returns the names of the arguments of all public functions and classes."""
    from accel.api import bench, bisect, plan, preflight, reproduce
    from accel.plan.spec import Layout, ModelSpec
    from accel.serve.client.grpc import InferenceClient

    functions = [getattr(accel, name) for name in accel.__all__ if inspect.isfunction(getattr(accel, name))]
    functions += [
        ModelSpec,
        Layout,
        InferenceClient,
        bench.sweep,
        bisect.bisect,
        plan.search_for_config,
        preflight.preflight,
        reproduce.reproduce,
    ]
    known = {name for function in functions for name in inspect.signature(function).parameters}
    return known | set(SourceOptions.__annotations__) | set(inspect.signature(accel.Source).parameters)


def spelled() -> set[tuple[str, str]]:
    """Finds all calls of ``option``, ``options`` and ``arguments`` in the source. Returns the argument names in these
    calls, each with the file of the call."""
    found = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            names = {"option": given[:1], "options": given, "arguments": [one.arg for one in node.keywords if one.arg]}
            found |= {(str(path.relative_to(ROOT)), name) for name in names.get(node.func.id, [])}
    return found


def test_every_option_that_a_message_spells() -> None:
    """Checks that every argument in a message belongs to a public function, and that every option belongs to a
    command."""
    names = spelled()
    assert len({name for _, name in names}) > 50
    known = set().union(*options_of_commands().values())
    switches = {name: word for (name, _), word in SWITCHES.items()}
    arguments = arguments_of_functions()
    missing = [
        (file, name) for file, name in names if not {flag(name), switches.get(name)} & known and name not in PYTHON_ONLY
    ]
    missing += [(file, name) for file, name in names if name not in arguments and name not in ARGUMENTS]
    assert sorted(set(missing)) == []


def test_every_option_in_the_text_of_a_message() -> None:
    """Checks that every option in the text of a message belongs to a command."""
    options = options_of_commands()
    known = set().union(*options.values()) | FOREIGN
    missing = []
    for file, line, text in strings():
        for word in OPTION.findall(text):
            if " " in text and word not in known:
                missing.append(f"{file}:{line} {word}")
    assert missing == []


def test_every_command_in_the_text_of_a_message() -> None:
    """If a message recommends a command of accel, the command must have all of the options in the message."""
    options = options_of_commands()
    missing, seen = [], 0
    for file, line, text in strings():
        for words in re.split(r"\baccel (?=[a-z])", text)[1:]:
            first, *rest = re.split(r"[;,()\n]", words)[0].split() or [""]
            if first not in COMMANDS:
                continue
            seen += 1
            name = f"accel {first}"
            name = f"{name} {rest[0]}" if rest and f"{name} {rest[0]}" in options else name
            given = [word for word in rest if OPTION.fullmatch(word)]
            missing += [f"{file}:{line} {name} {word}" for word in given if word not in options[name]]
    assert seen > 40
    assert missing == []


def test_every_extra_that_a_message_installs() -> None:
    """Fails if a message says to install an extra that pyproject.toml lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    named = {
        extra.strip()
        for _, _, text in strings()
        for extras in re.findall(rf"{project['name']}\[([a-z,-]+)\]", text)
        for extra in extras.split(",")
    }
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "MissingExtra":
                named |= {one.value for one in node.args[1:] if isinstance(one, ast.Constant)}
    assert len(named) > 8
    assert named <= known


def test_every_variable_that_a_message_sets() -> None:
    """Checks that the code reads every environment variable that a message names."""
    named = {word for _, _, text in strings() if " " in text for word in re.findall(r"\bACCEL_[A-Z_]+\b", text)}
    read = {text for _, _, text in strings() if re.fullmatch(r"ACCEL_[A-Z_]+", text)}
    assert named
    assert named <= read


def test_every_page_and_name_of_a_message() -> None:
    """Fails if a message names a missing page of docs/ or a missing Python name of accel."""
    missing = []
    for file, line, text in strings():
        if " " not in text:
            continue
        missing += [
            f"{file}:{line} {page}" for page in re.findall(r"docs/[\w/-]+\.md", text) if not (ROOT / page).is_file()
        ]
        for name in re.findall(r"\baccel(?:\.[A-Za-z_]\w*)+", text):
            if not exists(name):
                missing.append(f"{file}:{line} {name}")
    assert missing == []


def exists(name: str) -> bool:
    """Returns True if a dotted name of accel can be imported."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_error_of_a_command_names_its_options(name: str) -> None:
    """Checks that the strings in a command's file only name options of this command. A string that names another
    command may also name the other command's options."""
    options = options_of_commands()
    file = Path("accel", "cli", f"{name}.py")
    own = set().union(*(words for key, words in options.items() if key.startswith(f"accel {name}")))
    missing = []
    for path, line, text in strings():
        named = re.findall(r"\baccel ([a-z]+)", text)
        others = set().union(*(options.get(f"accel {one}", set()) for one in named))
        for word in OPTION.findall(text):
            if path == file and " " in text and word not in own | others | FOREIGN:
                missing.append(f"{line} {word}")
    assert missing == []
