"""Writes a tokenizer as OpenVINO models, which openvino-genai reads beside a decoder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

from accel.child import run_in_child
from accel.errors import AccelError, BadSource, one_line
from accel.progress import report

TOKENIZER_IR = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_LIBRARY = "openvino_tokenizers"
_SECONDS = 600.0
# Texts on which the IR and the tokenizer have to agree: spaces, digits, letters with accents, other scripts.
_TEXTS = ("def f(x):\n    return x + 1", "  two  spaces", "Ünïcödé, 東京 and 42!")


def write_tokenizer_ir(folder: Path) -> None:
    """Writes the IR of the tokenizer in ``folder``, if openvino-tokenizers is installed and can convert it. Otherwise,
    ``missing_ir`` tells why there is none."""
    for name in TOKENIZER_IR:
        for file in (folder / name, (folder / name).with_suffix(".bin")):
            file.unlink(missing_ok=True)
    if not _installed() or not (folder / "tokenizer_config.json").is_file():
        return
    try:
        with TemporaryDirectory(prefix=".tokenizer.", dir=folder) as made:
            run_in_child("accel.decoders.tokenizer_ir:convert", timeout=_SECONDS, folder=folder, out=Path(made))
            for file in sorted(Path(made).iterdir()):  # each .bin before its .xml
                file.replace(folder / file.name)
    except (AccelError, TimeoutError) as error:
        report(f"the tokenizer has no IR: {one_line(error, 200)}")


def missing_ir(folder: Path) -> str | None:
    """Returns why openvino-genai can't read texts with the decoder in ``folder``, or None if it can."""
    if all((folder / name).is_file() for name in TOKENIZER_IR):
        return None
    if not (folder / "tokenizer_config.json").is_file():
        why = "the source has no tokenizer"
    elif not _installed():
        why = "openvino-tokenizers isn't installed; run pip install openvino-tokenizers and export again"
    else:
        why = "openvino-tokenizers can't convert the tokenizer"
    return f"the folder has no {TOKENIZER_IR[0]}, so openvino-genai takes token ids and no text: {why}"


def _installed() -> bool:
    try:
        return importlib.util.find_spec(_LIBRARY) is not None
    except ValueError:  # the library failed to import before
        return False


def convert(folder: Path, out: Path) -> None:
    """Converts the tokenizer in ``folder`` to an IR and a detokenizer in ``out``. Runs in the child process.

    Raises ``BadSource`` if the library fails, or if the IR gives other ids or texts than the tokenizer.
    """
    try:
        import openvino
        from openvino_tokenizers import convert_tokenizer
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        models = convert_tokenizer(tokenizer, with_detokenizer=True)
        encode, decode = (openvino.compile_model(model, "CPU") for model in models)
        for text in _TEXTS:
            wanted = tokenizer(text)["input_ids"]
            found = encode([text])["input_ids"]
            if found.tolist() != [wanted]:
                raise BadSource(f"the IR gives the ids {found.tolist()[0]} for {text!r}, the tokenizer {wanted}")
            back = decode(found)["string_output"][0]
            if back != (said := tokenizer.decode(wanted, skip_special_tokens=True)):
                raise BadSource(f"the IR gives the text {back!r} for {wanted}, the tokenizer {said!r}")
        for model, name in zip(models, TOKENIZER_IR, strict=True):
            openvino.save_model(model, str(out / name))
    except BadSource:
        raise
    except Exception as error:  # the libraries raise errors of many types
        raise BadSource(one_line(error, 160) or type(error).__name__) from error
