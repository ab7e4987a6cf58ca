"""Chooses the texts that decoders are judged on, and other texts that they are calibrated on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accel.decoders.decoder import Decoder
from accel.decoders.generation import begin
from accel.decoders.sampling import Sampling
from accel.errors import BadData
from accel.progress import report
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np

WINDOW = 256
MOST_TOKENS = 2048
# The logits of the source stay in memory while the candidates are judged.
_MOST_BYTES = 1 << 28
_SAMPLED_TEXTS = 8
# Calibration needs more tokens than a layer has inputs, but judges only by sums.
_CALIBRATED_TEXTS, _FEWEST_TEXTS = 32, 8
# The first random numbers of the texts to judge on and of those to calibrate on.
_JUDGED, _CALIBRATED = 0, 1


def judged_texts(decoder: Decoder, text: Path | None) -> Iterator[np.ndarray]:
    """Yields the token ids of each window of the text, or of each text that the decoder samples."""
    length, most = _sizes(decoder)
    if text is None:
        yield from _sampled(decoder, _SAMPLED_TEXTS, min(length, most // _SAMPLED_TEXTS), _JUDGED)
        return
    ids = _encoded(decoder, text)[:most]
    if len(ids) < 2:
        raise BadData(f"{text} has fewer than two tokens; give a longer text with {option('text')}")
    yield from (part for start in range(0, len(ids), length) if len(part := ids[start : start + length]) > 1)


def calibration_texts(decoder: Decoder, text: Path | None) -> np.ndarray:
    """Returns the token ids [texts, length] of texts that ``judged_texts`` doesn't read: the text's part after the
    judged tokens, or texts that the decoder samples if that part is too short."""
    import numpy as np

    length, most = _sizes(decoder)
    if text is not None:
        rest = _encoded(decoder, text)[most:][: _CALIBRATED_TEXTS * length]
        if len(rest) >= _FEWEST_TEXTS * length:
            return rest[: len(rest) // length * length].reshape(-1, length)
    found = _sampled(decoder, _CALIBRATED_TEXTS, min(length, most // _SAMPLED_TEXTS), _CALIBRATED)
    # A text that ended early repeats itself, because all texts of a file have the same length.
    longest = max(map(len, found))
    return np.stack([np.resize(one, longest) for one in found])


def _sizes(decoder: Decoder) -> tuple[int, int]:
    """Returns the length of a window, and the most tokens that are judged."""
    length = min(WINDOW, decoder.tokens.context or WINDOW)
    return length, max(2 * length, min(MOST_TOKENS, _MOST_BYTES // (4 * decoder.vocabulary)))


def _sampled(decoder: Decoder, texts: int, length: int, seed: int) -> list[np.ndarray]:
    import numpy as np

    first = decoder.tokens.first or 0
    sampling = Sampling(temperature=1.0, seed=seed)
    own = begin(decoder, [[first]] * texts, tokenizer=None, most=length - 1, sampling=sampling)
    for number, _ in enumerate(own):
        report("sampling texts", number / ((length - 1) * texts))
    return [np.array(row.tokens) for row in own.rows if len(row.tokens) > 1]


def _encoded(decoder: Decoder, text: Path) -> np.ndarray:
    import numpy as np

    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadData(f"{text} is no text in UTF-8; give a text file with {option('text')}") from error
    return np.array(decoder.tokenizer.encode(content), np.int64)
