"""Implements ``accel generate``, which prints the text that a decoder generates, as it is generated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.errors import BadInputSpec

from . import output_options
from .options import source_options

if TYPE_CHECKING:
    from accel.api.decoder.generate import Answers, Prompt
    from accel.sources.source import SourceOptions

    from . import Output


@click.command("generate")
@click.argument("model", metavar="DECODER")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Repeat for several. Default: stdin.")
@click.option("--prompt-ids", multiple=True, metavar="ID,ID,...", help="A prompt of token ids. Needs no tokenizer.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="The most tokens of an answer.")
@click.option("--temperature", type=float, help="Below 1 prefers likely tokens. Default: always the most likely.")
@click.option("--top-k", type=int, help="Choose among this many most likely tokens.")
@click.option("--top-p", type=float, help="Choose among the most likely tokens with this total probability.")
@click.option("--min-p", type=float, help="Leave out tokens less likely than this share of the most likely one.")
@click.option("--repetition-penalty", type=float, help="Above 1 makes tokens of the text less likely.")
@click.option("--presence-penalty", type=float, default=0.0, help="Subtracted from the logits of generated tokens.")
@click.option("--logit-bias", multiple=True, metavar="ID=NUMBER", help="Added to the logit of a token id.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer before this text.")
@click.option("--seed", type=int, help="Equal seeds give equal answers.")
@click.option("--beams", type=int, default=1, show_default=True, help="Search for the most likely answer.")
@click.option("--sequences", type=int, default=1, show_default=True, help="Answers to each prompt.")
@click.option("--chat", is_flag=True, help="Send each prompt as a message, in the form of the model's chat template.")
@click.option("--truncate", is_flag=True, help="Drop the beginning of a prompt that is longer than the context.")
@click.option("--json-schema", metavar="FILE", help="Every answer is JSON of this schema.")
@click.option("--grammar", type=click.Path(path_type=Path), metavar="FILE", help="A grammar of answers (Lark).")
@click.option("--draft", metavar="DECODER|ngram", help="Propose tokens by a smaller decoder, or by looking them up.")
@click.option("--adapter", metavar="NAME", help="Run with this LoRA adapter of the decoder. Default: the base model.")
@click.option("--runtime", help="The runtime. Default: the one that the decoder was made for.")
@source_options
@output_options
def command(
    model: str,
    source: SourceOptions,
    prompts: tuple[str, ...],
    prompt_ids: tuple[str, ...],
    logit_bias: tuple[str, ...],
    say: Output,
    **options: Any,
) -> None:
    """Generate text with DECODER, the folder of an exported decoder or of a transformers model.

    An answer is printed as it is generated. Several answers are printed one after the other.
    """
    from accel.api.decoder.generate import generate
    from accel.decoders.tokenizer import parse_ids

    given: list[Prompt] = [*prompts, *map(parse_ids, prompt_ids)]
    if not given and not sys.stdin.isatty():
        given = [sys.stdin.read()]
    answers = generate(model, given, logit_bias=_bias(logit_bias), **options, **source)
    with answers:
        if say.as_json or len(answers.prompts) > 1:
            say.result(_json(answers), lambda: _texts(answers))
        else:
            _stream(answers)
    if not say.quiet:
        count = sum(map(len, answers.ids))
        click.echo(
            f"accel: {count} tokens, {answers.tokens_per_second:.1f} tokens/s, the first after "
            f"{answers.seconds_to_first_token:.2f} s{_drafted(answers)}",
            err=True,
        )


def _drafted(answers: Answers) -> str:
    """Returns what the draft was good for, in words."""
    found = answers.drafted
    if found is None:
        return ""
    gain = f", {found.gain:.2f} times as fast as token by token" if found.gain else ""
    return f"; {100 * found.share:.0f}% of {found.proposed} drafted tokens accepted{gain}"


def _stream(answers: Answers) -> None:
    """Prints each piece of text as soon as it is complete, or each token id without a tokenizer."""
    for number, token in enumerate(answers):
        piece = token.text if answers.tokenizer else f"{',' if number else ''}{token.id}"
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()


def _texts(answers: Answers) -> str:
    """Returns several answers as text, with an empty line between two answers."""
    shown = [
        ",".join(map(str, ids)) if text is None else text for text, ids in zip(answers.texts, answers.ids, strict=True)
    ]
    return "\n\n".join(shown)


def _json(answers: Answers) -> dict[str, Any]:
    rows = zip(answers.prompts, answers.ids, answers.texts, answers.finishes, strict=True)
    found = [{"prompt_ids": prompt, "ids": ids, "text": text, "finish": end} for prompt, ids, text, end in rows]
    speed: dict[str, Any] = {
        "seconds_to_first_token": round(answers.seconds_to_first_token, 6),
        "tokens_per_second": round(answers.tokens_per_second, 3),
    }
    if (drafted := answers.drafted) is not None:
        gain = round(drafted.gain, 3) if drafted.gain else None
        speed["draft"] = {"proposed": drafted.proposed, "accepted": drafted.accepted, "gain": gain}
    return {**found[0], **speed} if len(found) == 1 else {"answers": found, **speed}


def _bias(texts: tuple[str, ...]) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in texts:
        token, _, number = text.partition("=")
        try:
            found[int(token)] = float(number)
        except ValueError:
            raise BadInputSpec(f"can't read --logit-bias {text!r}; write ID=NUMBER, e.g. 42=-5") from None
    return found
