"""Proves that answers follow a JSON schema or a grammar, and that bad ones are refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.errors import BadSource, RunFailed, UsageError
from tests.support.small_decoder import save_byte_tokenizer, save_decoder

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
LARK = 'start: "yes" | "no" (" " /[0-9]{2}/)+'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an exported decoder with a tokenizer of bytes, whose own answers are noise."""
    source = save_byte_tokenizer(save_decoder(tmp_path_factory.mktemp("decoder") / "llama"))
    out = tmp_path_factory.mktemp("exported") / "dec"
    accel.export(source, out=out, simplify=False)
    return out


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 1}, {"top_k": 3, "draft": "ngram"}])
def test_answers_follow_the_schema(folder: Path, options: dict[str, Any]) -> None:
    """Fails if a token outside the schema is chosen, top-k leaves only forbidden tokens, a row follows the answer of
    another, a draft's rejected tokens stay in the answer, or an answer goes on after its end."""
    answers = accel.generate(folder, ["a", "bcd"], json_schema=SCHEMA, sequences=3, max_new_tokens=120, **options)
    assert answers.finishes == ["end"] * 6
    for text in answers.texts:
        assert text is not None
        found = json.loads(text)
        assert set(found) == {"name", "kind", "age"}
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 4
        assert found["kind"] in ("cat", "dog")
        assert isinstance(found["age"], int)
        assert 0 <= found["age"] <= 20


@pytest.mark.parametrize("sequence", [False, True])
def test_a_tokenizer_with_a_space_before_each_text(folder: Path, tmp_path: Path, sequence: bool) -> None:
    """Fails if the space that the tokenizer puts before a text is taken as the beginning of the text that the grammar
    asks for."""
    copy = shutil.copytree(folder, tmp_path / "dec")
    found = json.loads((copy / "tokenizer.json").read_text())
    assert found["pre_tokenizer"]["type"] == "ByteLevel"
    found["pre_tokenizer"]["add_prefix_space"] = True
    if sequence:
        found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [found["pre_tokenizer"]]}
    (copy / "tokenizer.json").write_text(json.dumps(found))
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    (text,) = accel.generate(copy, "x", json_schema=schema, max_new_tokens=30).texts
    assert text is not None
    assert json.loads(text) == {"a": 3}


def test_a_grammar(folder: Path, tmp_path: Path) -> None:
    """Fails if a grammar given as a file or as a text isn't followed, or a draft changes the answer."""
    import re

    (tmp_path / "g.lark").write_text(LARK)
    options = {"temperature": 1.0, "seed": 5, "sequences": 4, "max_new_tokens": 30}
    answers = accel.generate(folder, "a", grammar=tmp_path / "g.lark", **options)
    assert all(re.match(r"yes|no( \d\d)+|no( \d\d)* ?\d?", text or "") for text in answers.texts)
    assert accel.generate(folder, "a", grammar=LARK, **options).ids == answers.ids
    assert accel.generate(folder, "a", grammar=LARK, draft=folder, **options).ids == answers.ids


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "both": ({"json_schema": {}, "grammar": LARK}, UsageError, "leave out one of the two"),
    "an unknown type": (
        {"json_schema": {"type": "nope"}},
        UsageError,
        r"json_schema= is not valid \(Invalid type: nope",
    ),
    "no object": ({"json_schema": "list.json"}, UsageError, r"no JSON schema but \[1\]"),
    "half a file": ({"json_schema": "half.json"}, UsageError, r"json_schema= is no JSON \(.*\); correct it"),
    "no file": ({"json_schema": "none.json"}, UsageError, r"can't read json_schema= none.json \(No such file"),
    "a folder": ({"grammar": Path()}, UsageError, r"can't read grammar= \. \(Is a directory"),
    "bytes": ({"grammar": Path("bytes.lark")}, UsageError, "is no text in UTF-8"),
    "an unknown name": ({"grammar": "start: foo"}, UsageError, 'unknown name: "foo"'),
    "nothing": ({"grammar": ""}, UsageError, r"grammar= is not valid \(Empty grammar"),
    "a search": ({"json_schema": {}, "beams": 2}, UsageError, "goes without a grammar"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_grammars(bad: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.json").write_text('{"type": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.lark").write_bytes(b"\xff\xfe")
    arguments, error, said = BAD[bad]
    with pytest.raises(error, match=said) as refused:
        accel.generate(folder, "a", max_new_tokens=4, **arguments)
    assert "\n" not in str(refused.value)


def test_what_a_grammar_needs(folder: Path, tmp_path: Path) -> None:
    """Fails if a decoder without a tokenizer or without an end gets stuck, or if a tokenizer of another kind or a
    schema that nothing fits ends in a traceback."""
    copy = shutil.copytree(folder, tmp_path / "dec")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(BadSource, match=r"has no tokenizer"):
        accel.generate(copy, [[5]], json_schema={})
    other = shutil.copytree(folder, tmp_path / "other")
    found = json.loads((other / "tokenizer.json").read_text())
    found["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    (other / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(UsageError, match=r"^llguidance can't use this tokenizer \(.*; leave out json_schema="):
        accel.generate(other, "a", json_schema={})
    with pytest.raises((UsageError, RunFailed), match=r"is not valid|allows no token"):
        _ = accel.generate(folder, "a", json_schema={"type": "integer", "minimum": 5, "maximum": 3}).ids


def test_the_command(folder: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Fails if the command doesn't pass the file on, or a bad one isn't a usage error."""
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    words = ("generate", str(folder), "--prompt", "hi", "--max-new-tokens", "120", "-q")
    ran = cli(*words, "--json-schema", str(tmp_path / "s.json"))
    assert json.loads(ran.stdout)["kind"] in ("cat", "dog")
    (tmp_path / "s.json").write_text('{"type": 7}')
    ran = cli(*words, "--json-schema", str(tmp_path / "s.json"))
    assert (ran.code, ran.stdout) == (2, "")
    assert "--json-schema is not valid" in ran.stderr
