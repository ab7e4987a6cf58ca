"""Feeds texts through a decoder whose runtime keeps the KV cache between runs, as openvino-genai does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

from accel.errors import GateFailed, UnsupportedHere
from accel.runtimes.base import Session
from accel.runtimes.openvino import OpenVinoSession
from accel.signature import Feeds, numpy_dtype
from accel.signature.decoder import BEAMS, LOGITS

if TYPE_CHECKING:
    import numpy as np

# The bytes of a value in each precision of the cache.
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
# The precisions of matrix products that round more than float32 does.
_ROUNDED = ("bf16", "f16")


class StatefulCache:
    """Runs the steps of a batch of ``rows`` rows, as ``KvCache`` does. The runtime holds the cache, and this class the
    order of its rows.

    Raises ``GateFailed`` if the session was opened in float32 and computes a matrix product with fewer bits.
    """

    def __init__(self, session: Session, rows: int, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """``arrays`` are the keys and values to begin with, by the names of the inputs of a decoder that is given
        them."""
        import numpy as np

        opened = _openvino(session)
        if opened.options.precision == "fp32":
            check_float32(opened)
        named = None if arrays is None else _by_variable(opened, arrays)
        self._next = opened.steps(named)
        self._order = np.arange(rows, dtype=np.int32)

    def step(self, feeds: Feeds) -> np.ndarray:
        """Runs the model with the inputs ``feeds`` beside the cache. Returns the logits [rows, new tokens, vocabulary],
        and adds the new tokens to the cache."""
        import numpy as np

        outputs = self._next({**feeds, BEAMS: self._order})
        self._order = np.arange(len(self._order), dtype=np.int32)
        return outputs[LOGITS]

    def reorder(self, rows: Iterable[int]) -> None:
        """Puts the rows of the cache into a new order at the next step. A row may be repeated or left out."""
        self._order = self._order[list(rows)]

    def crop(self, tokens: int) -> None:  # noqa: ARG002 - the tokens are in the runtime
        """Raises ``UnsupportedHere``, because the runtime keeps all tokens."""
        raise UnsupportedHere("OpenVINO keeps the cache and forgets no tokens; export the decoder to ONNX")

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Returns no arrays, because the cache is in the runtime."""
        return {}


def _by_variable(session: OpenVinoSession, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the keys and values by the names of the variables, which begin with the names of the inputs."""
    variables = [spec.name for spec in session.state()]
    return {name: next(value for past, value in arrays.items() if name.startswith(past)) for name in variables}


def check_float32(session: OpenVinoSession) -> None:
    """Raises ``GateFailed`` if a matrix product is computed with fewer bits than float32. On CPUs with bfloat16, this
    is OpenVINO's default."""
    found = session.computed_in()
    if rounded := [name for name in found if name in _ROUNDED]:
        raise GateFailed(
            f"OpenVINO computes {found[rounded[0]]} matrix products of {session.artifact.path} in {rounded[0]} instead "
            "of float32; open it with the precision bf16 if that is what you want"
        )


def kept_in(session: Session) -> list[str]:
    """Returns the precisions in which the runtime keeps the cache, as read back from the compiled model."""
    return list(_openvino(session).cache_kept_in())


def state_bytes_a_token(session: Session) -> int:
    """Returns the number of bytes that the state grows by for each token of a row."""
    opened = _openvino(session)
    kept = opened.cache_kept_in()
    rounded = next(iter(kept)) if len(kept) == 1 else ""
    found = 0
    for spec in opened.state():
        values = prod(size for size in spec.shape if isinstance(size, int))
        found += values * _BYTES.get(rounded, numpy_dtype(spec.dtype).itemsize)
        if rounded == "int8":
            # Each head of a token has a scale and a zero point in float32.
            found += 2 * 4 * (values // int(spec.shape[-1]))
    return found


def _openvino(session: Session) -> OpenVinoSession:
    if not isinstance(session, OpenVinoSession) or not session.keeps_state:
        raise UnsupportedHere(
            f"the decoder takes {BEAMS}, so its runtime keeps the cache, but {session!r} keeps none; export it to "
            "OpenVINO again"
        )
    return session
