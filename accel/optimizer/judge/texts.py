"""Chooses the texts that decoders are judged on, and other texts that they are calibrated on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accel.decoders.decoder import Decoder
from accel.errors import BadData
from accel.progress import report
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np

WINDOW = 256
MOST_TOKENS = 2048
# The logits of the source stay in memory while the candidates are judged.
_MOST_BYTES = 1 << 28
# A step of the source reads all weights, so many short texts take less time than few long ones.
_SAMPLED_TEXTS = 16
# Calibration needs more tokens than a layer has inputs, but judges only by sums.
_CALIBRATED_TEXTS, _FEWEST_TEXTS = 32, 8
# The first random numbers of the texts to judge on and of those to calibrate on.
_JUDGED, _CALIBRATED = 0, 1


def judged_texts(decoder: Decoder, text: Path | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the token ids of each window of the text, or of each text that the decoder samples. Also yields the
    decoder's logits [length - 1, vocabulary] of all tokens but the last."""
    length, most = _sizes(decoder)
    if text is None:
        yield from _sampled(decoder, _SAMPLED_TEXTS, min(length, most // _SAMPLED_TEXTS), _JUDGED)
        return
    ids = _encoded(decoder, text)[:most]
    if len(ids) < 2:
        raise BadData(f"{text} has fewer than two tokens; give a longer text with {option('text')}")
    for start in range(0, len(ids), length):
        if len(part := ids[start : start + length]) > 1:
            yield part, decoder.begin([()]).step(part[None])[0, :-1]


def calibration_texts(decoder: Decoder, text: Path | None) -> np.ndarray:
    """Returns the token ids [texts, length] of texts that ``judged_texts`` doesn't read: the text's part after the
    judged tokens, or texts that the decoder samples if that part is too short."""
    import numpy as np

    length, most = _sizes(decoder)
    if text is not None:
        rest = _encoded(decoder, text)[most:][: _CALIBRATED_TEXTS * length]
        if len(rest) >= _FEWEST_TEXTS * length:
            return rest[: len(rest) // length * length].reshape(-1, length)
    found = [ids for ids, _ in _sampled(decoder, _CALIBRATED_TEXTS, min(length, most // _SAMPLED_TEXTS), _CALIBRATED)]
    # A text that ended early repeats itself, because all texts of a file have the same length.
    longest = max(map(len, found))
    return np.stack([np.resize(one, longest) for one in found])


def _sizes(decoder: Decoder) -> tuple[int, int]:
    """Returns the length of a window, and the most tokens that are judged."""
    length = min(WINDOW, decoder.tokens.context or WINDOW)
    return length, max(2 * length, min(MOST_TOKENS, _MOST_BYTES // (4 * decoder.vocabulary)))


def _sampled(decoder: Decoder, texts: int, length: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the token ids of texts that the decoder draws from its own distributions, with the logits of all tokens
    but the last. A text ends after ``length`` tokens, or with a token that ends texts."""
    import numpy as np

    draw, running = np.random.default_rng(seed), decoder.begin([()] * texts)
    ids = np.full((texts, 1), decoder.tokens.first or 0, np.int64)
    logits: list[np.ndarray] = []
    ended = np.zeros(texts, bool)
    while ids.shape[1] < length and not ended.all():
        report("sampling texts", ids.shape[1] / length)
        logits.append(running.step(ids[:, -1:])[:, -1])
        known = logits[-1][:, : decoder.vocabulary]
        sums = np.exp(known - known.max(axis=1, keepdims=True)).cumsum(axis=1, dtype=np.float64)
        drawn = (sums < draw.random((texts, 1)) * sums[:, -1:]).sum(axis=1)
        ids = np.concatenate([ids, drawn[:, None]], axis=1)
        ended |= np.isin(drawn, decoder.tokens.ends)
    for row in range(texts):
        last = np.flatnonzero(np.isin(ids[row, 1:], decoder.tokens.ends))[:1] + 1
        count = int(last[0]) if len(last) else ids.shape[1] - 1
        yield ids[row, : count + 1], np.stack([step[row] for step in logits[:count]])


def _encoded(decoder: Decoder, text: Path) -> np.ndarray:
    import numpy as np

    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadData(f"{text} is no text in UTF-8; give a text file with {option('text')}") from error
    return np.array(decoder.tokenizer.encode(content), np.int64)
