"""Renders a conversation with a model's chat template. A template comes from outside, so it runs in a sandbox, in a
child process with limits on time and length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.child import run_in_child
from accel.errors import AccelError, BadSource, MissingExtra, one_line

_SECONDS = 60.0  # including the import of transformers
_MEMORY = 4 << 30
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def rendered(template: str, messages: Sequence[Mapping[str, str]], folder: Path, longest: int) -> str:
    """Returns the conversation ``messages`` as the prompt for the next answer, at most ``longest`` characters. The
    special tokens come from ``folder``.

    Raises ``BadSource`` if the template fails, takes too long or writes too much.
    """
    try:
        text: str = run_in_child(
            "accel.decoders.chat:render",
            timeout=_SECONDS,
            template=template,
            messages=[dict(message) for message in messages],
            tokens=_special(folder),
        )
    except MissingExtra:
        raise
    except (AccelError, TimeoutError) as error:
        why = f"took longer than {_SECONDS:g} s" if isinstance(error, TimeoutError) else one_line(error, 160)
        raise BadSource(
            f"the chat template of {folder} fails ({why}); correct the template, or give the whole prompt without it"
        ) from error
    if len(text) > longest:
        raise BadSource(f"the chat template of {folder} writes {len(text)} characters; correct the template")
    return text


def render(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> str:
    """Renders the template in this process. Raises ``BadSource`` with the template's error."""
    import resource

    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise MissingExtra("transformers", "decoders") from error
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY + _used(), resource.RLIM_INFINITY))
    try:
        given: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True, **tokens}
        texts = render_jinja_template([messages], **given)[0]
    except Exception as error:  # a template may raise any type of error
        raise BadSource(one_line(error, 160) or type(error).__name__) from error
    return str(texts[0])


def _used() -> int:
    """Returns the bytes of address space that this process uses."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * 4096


def _special(folder: Path) -> dict[str, str]:
    """Returns the texts of the special tokens in the tokenizer's config."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        found: dict[str, Any] = {name: config.get(name) for name in _TOKENS}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}
