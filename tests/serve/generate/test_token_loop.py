"""Proves that token-by-token generation streams correct tokens from real models over gRPC."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.support.onnx_builder import artifact, node
from tests.support.serving import FLOAT, INT64, Start, assert_refused

VOCABULARY, WIDTH = 11, 6
_RNG = np.random.default_rng(3)
TABLE = _RNG.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
MIX = _RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
OUT = _RNG.standard_normal((WIDTH, VOCABULARY)).astype(np.float32)
WEIGHTS = {"table": TABLE, "mix": MIX, "out": OUT}

POLICY = "model_transaction_policy { decoupled: true }\n"


def parameters(**options: str) -> str:
    return "".join(
        f'parameters {{ key: "stream_{key.replace("__", ".")}" value {{ string_value: "{value}" }} }}\n'
        for key, value in options.items()
    )


RECURRENT = POLICY + parameters(tokens="ids", logits="logits", state__new="state", steps="12")
CACHED = POLICY + parameters(
    tokens="ids", logits="logits", state__present="past", mask="mask", positions="positions", steps="12"
)
WHOLE = POLICY + parameters(tokens="ids", logits="logits", steps="12")


def recurrent(folder: Path) -> None:
    """Writes a model that takes one token at a time. The model computes ``new = tanh(table[ids] + state @ mix)`` and
    ``logits = new @ out``."""
    folder.mkdir(parents=True)
    artifact(
        folder / "model.onnx",
        [
            node("Squeeze", "ids one", "token"),
            node("Gather", "table token", "embedded"),
            node("MatMul", "state mix", "kept"),
            node("Add", "embedded kept", "sum"),
            node("Tanh", "sum", "new"),
            node("MatMul", "new out", "logits"),
        ],
        {"ids": (INT64, ["batch", 1]), "state": (FLOAT, ["batch", WIDTH])},
        {"logits": (FLOAT, ["batch", VOCABULARY]), "new": (FLOAT, ["batch", WIDTH])},
        {**WEIGHTS, "one": np.array([1], np.int64)},
    )


def recurrent_reference(prompt: list[int], steps: int) -> list[int]:
    state = np.zeros(WIDTH, np.float32)
    written, left = [], list(prompt)
    for _ in range(steps):
        for token in left:
            state = np.tanh(TABLE[token] + state @ MIX)
        written.append(int((state @ OUT).argmax()))
        left = written[-1:]
    return written


def cached(folder: Path) -> None:
    """Writes a decoder with a KV cache. The new rows of the cache are ``table[ids] * (1 + positions)``. The output
    ``present`` is the input ``past`` with the new rows appended. The logits are computed from the sum of the unmasked
    rows of ``present``."""
    folder.mkdir(parents=True)
    artifact(
        folder / "model.onnx",
        [
            node("Gather", "table ids", "embedded"),
            node("Cast", "positions", "p", to=FLOAT),
            node("Add", "p one", "p1"),
            node("Unsqueeze", "p1 two", "p2"),
            node("Mul", "embedded p2", "placed"),
            node("Concat", "past placed", "present", axis=1),
            node("Cast", "mask", "m", to=FLOAT),
            node("Unsqueeze", "m two", "m2"),
            node("Mul", "present m2", "seen"),
            node("ReduceSum", "seen middle", "sum", keepdims=1),
            node("MatMul", "sum out", "logits"),
        ],
        {
            "ids": (INT64, ["batch", "length"]),
            "past": (FLOAT, ["batch", "before", WIDTH]),
            "mask": (INT64, ["batch", "all"]),
            "positions": (INT64, ["batch", "length"]),
        },
        {"logits": (FLOAT, ["batch", 1, VOCABULARY]), "present": (FLOAT, ["batch", "after", WIDTH])},
        {
            "table": TABLE,
            "out": OUT,
            "one": np.float32(1),
            "two": np.array([2], np.int64),
            "middle": np.array([1], np.int64),
        },
    )


def cached_reference(prompt: list[int], steps: int) -> list[int]:
    written = list(prompt)
    for _ in range(steps):
        placed = TABLE[written] * np.arange(1, len(written) + 1, dtype=np.float32)[:, None]
        written.append(int((placed.sum(0) @ OUT).argmax()))
    return written[len(prompt) :]


def whole(folder: Path) -> None:
    """Writes a decoder without a state. The logits of each position depend on all tokens up to this position."""
    folder.mkdir(parents=True)
    artifact(
        folder / "model.onnx",
        [
            node("Gather", "table ids", "embedded"),
            node("MatMul", "embedded mix", "mixed"),
            node("CumSum", "mixed axis", "sum"),
            node("MatMul", "sum out", "logits"),
        ],
        {"ids": (INT64, ["batch", "length"])},
        {"logits": (FLOAT, ["batch", "length", VOCABULARY])},
        {**WEIGHTS, "axis": np.int64(1)},
    )


def whole_reference(prompt: list[int], steps: int) -> list[int]:
    written = list(prompt)
    for _ in range(steps):
        written.append(int(((TABLE[written] @ MIX).sum(0) @ OUT).argmax()))
    return written[len(prompt) :]


KINDS: dict[str, Any] = {
    "recurrent": (recurrent, RECURRENT, recurrent_reference),
    "cached": (cached, CACHED, cached_reference),
    "whole": (whole, WHOLE, whole_reference),
}


def configure(root: Path, kind: str, more: str = "") -> None:
    make, config, _ = KINDS[kind]
    make(root / "writer" / "1")
    (root / "writer" / "config.pbtxt").write_text(config + more)


@contextmanager
def streaming(port: int) -> Iterator[Any]:
    """Yields ``ask(prompt)``, which streams a request and returns a pair (token or None, final) for each response. If
    the stream ends in an error, ``ask`` raises this error."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))

        def ask(prompt: Any, **options: Any) -> list[tuple[list[int] | None, bool]]:
            ids = np.atleast_2d(np.asarray(prompt, np.int64))
            given = triton.InferInput("ids", list(ids.shape), "INT64")
            given.set_data_from_numpy(ids)
            client.async_stream_infer("writer", [given], enable_empty_final_response=True, **options)
            parts: list[tuple[list[int] | None, bool]] = []
            while not parts or not parts[-1][1]:
                result, error = answers.get(timeout=60)
                if error is not None:
                    raise error
                token = result.as_numpy("token")
                final = result.get_response().parameters["triton_final_response"].bool_param
                parts.append((None if token is None else token[:, 0].tolist(), final))
            return parts

        yield ask
        client.stop_stream()


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_as_they_come(tmp_path: Path, start: Start, kind: str) -> None:
    """Fails if a streamed token differs from the token that the model computes, or if a part of the prompt is ignored.
    Also fails if the state of a stream reaches the next stream, or if the last response is missing."""
    configure(tmp_path, kind)
    process = start(tmp_path)
    reference = KINDS[kind][2]
    with streaming(process.ports["grpc"]) as ask:
        for prompt in ([4], [1, 2, 3], [4]):
            wanted = reference(prompt, 12)
            assert len(set(wanted)) > 1, "a model that repeats one token can't show a mix-up"
            assert ask(prompt) == [*(([token], False) for token in wanted), (None, True)]
        rows = ask([[1, 2], [7, 5]])
        one, other = reference([1, 2], 12), reference([7, 5], 12)
        assert [part for part, _ in rows[:-1]] == [list(pair) for pair in zip(one, other, strict=True)]
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        metadata = client.get_model_metadata("writer")
        assert [tensor.name for tensor in (*metadata.inputs, *metadata.outputs)] == ["ids", "token"]
        assert client.get_model_config("writer").config.model_transaction_policy.decoupled
        statistics = client.get_inference_statistics("writer").model_stats[0].inference_stats
        assert (statistics.success.count, statistics.fail.count) == (4, 0)


def test_the_token_that_ends(tmp_path: Path, start: Start) -> None:
    """Fails if a batch row continues after its end token, if the end token of a row ends the other rows, or if the
    final response is missing."""
    one, other = recurrent_reference([1], 12), recurrent_reference([2], 12)
    end = next(token for token in one[:-1] if one.index(token) != (other.index(token) if token in other else 12))
    stops = [row.index(end) if end in row else 11 for row in (one, other)]
    configure(tmp_path, "recurrent", parameters(end=str(end)))
    process = start(tmp_path)
    with streaming(process.ports["grpc"]) as ask:
        assert ask([1]) == [*(([token], False) for token in one[: stops[0] + 1]), (None, True)]
        rows = [part for part, final in ask([[1], [2]]) if not final]
        assert len(rows) == max(stops) + 1
        for column, row, stop in ((0, one, stops[0]), (1, other, stops[1])):
            said = [part[column] for part in rows if part is not None]
            assert said == [*row[: stop + 1], *[end] * (len(rows) - stop - 1)]


def test_requests_that_can_not_be_streamed(tmp_path: Path, start: Start) -> None:
    """Fails if a bad request gets the wrong error or breaks the stream."""
    configure(tmp_path, "recurrent")
    process = start(tmp_path)
    with streaming(process.ports["grpc"]) as ask:
        with pytest.raises(InferenceServerException, match="the prompt 'ids' is empty"):
            ask(np.empty((1, 0)))
        with pytest.raises(InferenceServerException, match="can't run"):
            ask([VOCABULARY])
        assert len(ask([1])) == 13
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        given = triton.InferInput("ids", [1, 1], "INT64")
        given.set_data_from_numpy(np.ones((1, 1), np.int64))
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as caught:
            client.infer("writer", [given])
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("kind", "before", "after", "said"),
    [
        ("recurrent", RECURRENT, POLICY, "a decoupled model needs a token loop, .*stream_tokens is missing"),
        ("recurrent", POLICY, "", "stream_logits needs model_transaction_policy"),
        ("recurrent", '"ids"', '"nothing"', "names the input 'nothing', but the model has the inputs: ids, state"),
        ("recurrent", '"logits"', '"nothing"', "name the output 'nothing', but the model has the outputs: logits, new"),
        ("recurrent", '"state"', '"ids"', "the input 'ids' twice"),
        ("recurrent", '"12"', '"0"', "stream_steps is '0'; write a number of at least 1"),
        ("recurrent", '"12"', '"3,4"', "stream_steps is '3,4'; write a number of at least 1$"),
        ("recurrent", POLICY, POLICY + parameters(end="1,"), "stream_end is '1,'; write .*, or several separated by"),
        ("recurrent", POLICY, POLICY + parameters(context="1"), "stream_context is '1'; write a number of at least 2"),
        ("recurrent", "stream_state.new", "stream_cache.new", "unknown parameter stream_cache.new"),
        ("recurrent", parameters(state__new="state"), "", "so the stream needs the model's state"),
        ("cached", '"mask"', '"past"', "the input 'past' twice"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, before: str, after: str, said: str) -> None:
    """Fails if a decoupled model without a valid token loop is READY."""
    make, config, _ = KINDS[kind]
    assert before in config
    make(tmp_path / "writer" / "1")
    (tmp_path / "writer" / "config.pbtxt").write_text(config.replace(before, after))
    assert_refused(tmp_path, said)
