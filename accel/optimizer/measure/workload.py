"""Defines the timed workload by a batch, a mix of lengths, and sequential or concurrent requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accel.errors import BadData, BadInputSpec, UsageError
from accel.proof.gates import cast_feeds
from accel.proof.stream import SampleStream
from accel.runtimes.base import BaseSession, open_session
from accel.signature import Feeds, Signature, shapes_of
from accel.signature.decoder import is_stateful, step_sizes
from accel.spelling import is_command_line, option
from accel.timing.blocks import Candidate

if TYPE_CHECKING:
    import numpy as np

Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput")

# The largest number of lengths to measure. A runtime has to prepare for each new shape, so a longer list of lengths is
# replaced by its quantiles.
_MOST_LENGTHS = 8
_READ_AT_ONCE = 64
# The number of tokens in the cache of a decoder that is timed.
_CONTEXT = 128
# The number of requests per core in one timed pass. With fewer requests, the throughput would depend too much on
# streams that finish early.
_REQUESTS_A_CORE = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of one timed pass.

    ``mix`` holds the inputs of each distinct request, one set per length. ``repeats`` is the number of times a pass
    runs the mix. ``note`` describes the workload. If ``in_cache`` is True, the requests are steps of a decoder, which
    run with the cache as a generation holds it. ``signature`` has the inputs of a decoder's requests.
    """

    objective: Objective
    mix: tuple[Feeds, ...]
    repeats: int
    note: str
    in_cache: bool = False
    signature: Signature | None = None

    @property
    def requests(self) -> int:
        """Returns the number of requests in a pass."""
        return len(self.mix) * self.repeats

    def candidate(self, candidate: Candidate) -> Candidate:
        """Returns ``candidate`` for timing, as a ``PassCandidate`` if a pass has several requests."""
        in_cache = self.in_cache or is_stateful(candidate.artifact.signature)
        if self.requests == 1 and not in_cache:
            return candidate
        return PassCandidate(
            name=candidate.name,
            artifact=candidate.artifact,
            runtime=candidate.runtime,
            options=candidate.options,
            mix=self.mix,
            repeats=self.repeats,
            opener="accel.optimizer.measure.decoding:DecodingPass" if in_cache else PassCandidate.opener,
            signature=self.signature,
        )


@dataclass(frozen=True)
class PassCandidate(Candidate):
    """A candidate for timing with several requests. Each timed run is one pass over the workload."""

    opener: str = "accel.optimizer.measure.workload:PassSession"
    streams: int = 1  # Passes run one at a time, and each pass uses all of the session's streams.
    mix: tuple[Feeds, ...] = ()
    repeats: int = 1
    signature: Signature | None = None


class PassSession:
    """A session in which one call of ``run`` is one pass over the workload. A pass runs as many requests concurrently
    as the wrapped session allows."""

    def __init__(self, candidate: PassCandidate) -> None:
        self._session: BaseSession = open_session(candidate.artifact, candidate.runtime, candidate.options)
        mix = [cast_feeds(self._session, feeds) for feeds in candidate.mix]
        self._distinct = len(mix)
        self._requests = mix * candidate.repeats

    @property
    def signature(self) -> Signature:
        return self._session.signature

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:  # noqa: ARG002 - the requests are known beforehand
        """Returns the outputs of each distinct request. The name of an output contains the number of the request."""
        outputs = self._session.run_many(self._requests)[: self._distinct]
        return {f"{name} of request {n}": value for n, found in enumerate(outputs) for name, value in found.items()}

    @property
    def phases(self) -> Callable[[Feeds], dict[str, float]] | None:
        """Returns a function that measures the time of each phase of a whole pass in ms. Returns None if the session
        can't time phases."""
        measure: Callable[[Feeds], dict[str, float]] | None = getattr(self._session, "phases", None)
        if measure is None:
            return None
        distinct, repeats = self._requests[: self._distinct], len(self._requests) // self._distinct

        def of_a_pass(feeds: Feeds) -> dict[str, float]:  # noqa: ARG001 - the requests are known beforehand
            found = [measure(request) for request in distinct]
            return {name: repeats * sum(one[name] for one in found) for name in found[0]}

        return of_a_pass

    def close(self) -> None:
        """Closes the session."""
        self._session.close()


def workload(
    signature: Signature,
    data: SampleStream | None,
    *,
    objective: str,
    sizes: Mapping[str, int],
    batch: int | None,
    lengths: str | Sequence[int] | None,
    cores: int,
) -> Workload:
    """Returns the workload for the user's options. The default workload is one sample of the data, or random inputs of
    the dims' usual sizes. The function ``read_lengths`` explains ``lengths``. ``cores`` is the number of threads of the
    session.

    Raises ``UsageError`` if two options contradict each other. Raises ``BadInputSpec`` for sizes outside the model's
    ranges.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective {objective!r}; use one of {', '.join(OBJECTIVES)}")
    wanted = dict(signature.known(sizes))
    if batch is not None:
        wanted |= _batch(signature, batch, wanted)
    dim, found = read_lengths(lengths, signature, data) if lengths is not None else ("", [])
    if dim in wanted:
        raise UsageError(f"the size of dim {dim!r} is given twice; leave the dim out of {option('sizes')}")
    for size in found:
        signature.known({dim: size})
    mix = tuple(_feeds(signature, data, {**wanted, dim: size}) for size in _few(found)) if found else ()
    mix = mix or (_feeds(signature, data, wanted),)
    for feeds in mix if batch is not None or lengths is not None else ():
        _within(signature, signature.check_feeds(feeds))
    repeats = -(-_REQUESTS_A_CORE * cores // len(mix)) if objective == "throughput" else 1
    note = f"measured at {shapes_of(mix[0])}"
    if len(mix) > 1:
        others = ", ".join(f"{name} {size}" for name, size in signature.check_feeds(mix[0]).items() if name != dim)
        note = f"measured at {others + ', ' if others else ''}{dim} {', '.join(map(str, _few(found)))} in turn"
    if len(found) > len(mix):
        note += f" (quantiles of {len(found)} lengths)"
    if repeats > 1:
        note += f", throughput over {repeats * len(mix)} requests"
    return Workload(objective=_known(objective), mix=mix, repeats=repeats, note=note)


def decode_steps(
    signature: Signature, contexts: Sequence[int], batch: int, objective: str, cores: int, most: int | None = None
) -> Workload:
    """Returns the workload of a decoder: one new token for each number of tokens in the cache. Without ``contexts``,
    there are 128 tokens, or fewer if the decoder takes at most ``most`` tokens.

    Raises ``BadInputSpec`` if a context leaves no room for a new token.
    """
    usual = _CONTEXT if most is None else min(_CONTEXT, most - 1)
    found = sorted(set(contexts)) or [usual]
    if most is not None and found[-1] >= most:
        raise BadInputSpec(
            f"the decoder takes {most} tokens, so {found[-1]} tokens leave no room for a new one; give smaller numbers "
            f"with {option('contexts', usual)}"
        )
    rows = _batch(signature, batch, {})
    mix = tuple(signature.example_inputs(**rows, **step_sizes(signature, 1, size)) for size in found)
    repeats = -(-_REQUESTS_A_CORE * cores // len(mix)) if objective == "throughput" else 1
    note = f"measured: one token with {' and '.join(map(str, found))} tokens in the cache"
    note += f", {batch} rows" if batch > 1 else ""
    if repeats > 1:
        note += f", throughput over {repeats * len(mix)} requests"
    # Concurrent requests would need a cache each.
    return Workload(
        objective=_known(objective), mix=mix, repeats=repeats, note=note, in_cache=repeats == 1, signature=signature
    )


def _known(objective: str) -> Objective:
    return "throughput" if objective == "throughput" else "latency"


def read_lengths(given: str | Sequence[int], signature: Signature, data: SampleStream | None) -> tuple[str, list[int]]:
    """Returns the name of the length dim, and the list of all lengths, including repeated lengths.

    ``given`` is a list of lengths, a text such as ``8,16,128``, the path of a file of whole numbers, or ``data``. If
    ``given`` is the word ``data``, returns the lengths of the samples. If the model has a mask input, a sample's length
    is the number of nonzero values in its mask. If the model has several dynamic dims besides the batch, the text has
    to begin with ``DIM=``, the name of the length dim. Raises ``BadInputSpec`` if several dims could be the length dim,
    and ``BadData`` if the file holds anything but whole numbers.
    """
    text = given if isinstance(given, str) else ",".join(map(str, given))
    name, equals, rest = text.partition("=")
    others = [d for d in signature.dims if d != signature.batch_dim]
    if equals and name in signature.dims:
        dim, text = name, rest
    elif len(others) == 1:
        dim = others[0]
    else:
        if not others:
            raise BadInputSpec(
                f"the model has no dim but the batch; leave out {_lengths_option(text)}, or give one batch size with "
                f"{option('batch')}"
            )
        named = _lengths_option(f"{others[0]}={text or '8,16,128'}")
        raise BadInputSpec(
            f"the model has the dims {', '.join(others)}; name the dim that the lengths are for, e.g. {named}"
        )
    if text == "data":
        return dim, _lengths_of(dim, signature, data)
    compact = text.replace(" ", "")
    if compact and not set(compact) - set("0123456789,"):
        numbers = [part for part in compact.split(",") if part]
    else:
        path = Path(text)
        if not path.is_file():
            raise BadData(
                f"the lengths {text} are neither numbers nor a file; give numbers as in "
                f"{_lengths_option('8,16,128')}, a file of whole numbers, or the word data"
            )
        try:
            numbers = path.read_text(encoding="utf-8").replace(",", " ").split()
        except (UnicodeDecodeError, OSError):
            numbers = [""]
        if not numbers or not all(part.isdecimal() and len(part) < 10 for part in numbers):
            raise BadData(f"the file {path} is not a list of lengths; write whole numbers, one per line")
    found = [int(part) for part in numbers]
    if not found or min(found) < 1:
        raise BadInputSpec("a length has to be at least 1; give whole numbers from 1 on")
    return dim, found


def _lengths_option(text: str) -> str:
    """Returns the option for lengths, which is ``--lengths`` for accel optimize and ``--length`` for accel bench."""
    return f"--lengths {text}" if is_command_line() else option("lengths", text)


def _lengths_of(dim: str, signature: Signature, data: SampleStream | None) -> list[int]:
    if data is None:
        raise UsageError(
            f"{_lengths_option('data')} reads the lengths from samples, but no samples are given; pass samples with "
            f"{option('data')}"
        )
    spec, axis = next((s, s.shape.index(dim)) for s in signature.inputs if dim in s.shape)
    masks = [s.name for s in signature.inputs if s.name.endswith("mask") and s.shape[1:] == (dim,)]
    found: list[int] = []
    for part in data.batches(_READ_AT_ONCE):
        if masks:
            # A sample is padded to the next length that the model accepts.
            found += [signature.dims[dim].up(int(n)) for n in (part[masks[0]] != 0).sum(axis=1)]
        else:
            found += [int(part[spec.name].shape[axis])] * len(part[spec.name])
    return found


def _few(lengths: Sequence[int]) -> list[int]:
    """Sorts ``lengths``. If there are more than ``_MOST_LENGTHS`` lengths, returns ``_MOST_LENGTHS`` evenly spaced
    quantiles instead."""
    ordered = sorted(lengths)
    if len(ordered) <= _MOST_LENGTHS:
        return ordered
    return [ordered[(2 * i + 1) * len(ordered) // (2 * _MOST_LENGTHS)] for i in range(_MOST_LENGTHS)]


def _batch(signature: Signature, batch: int, sizes: Mapping[str, int]) -> dict[str, int]:
    dim = signature.batch_dim
    if batch < 1:
        raise BadInputSpec(f"the batch size {batch} is too small; use at least 1")
    if dim is None:
        fixed = {spec.shape[0] for spec in signature.inputs if spec.shape}
        if fixed != {batch}:
            raise BadInputSpec(
                f"the model's batch is fixed; export the model with a dynamic batch to run batches of {batch}"
            )
        return {}
    if sizes.get(dim, batch) != batch:
        both = f"{option('batch', batch)} and {option('sizes', {dim: sizes[dim]})}"
        raise UsageError(f"the options {both} contradict each other; leave one out")
    return {dim: batch}


def _within(signature: Signature, sizes: Mapping[str, int]) -> None:
    for dim, size in sizes.items():
        known = signature.dims[dim]
        if not known.holds(size):
            raise BadInputSpec(
                f"size {size} of dim {dim} is outside the checked range {known.min}..{known.max} of the model; pass "
                f"{option('dims', {dim: known.to_hold(size)})}"
            )


def _feeds(signature: Signature, data: SampleStream | None, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns a sample of the data, cut or repeated to ``sizes``. Without data, returns random inputs of ``sizes``."""
    if data is None:
        return signature.example_inputs(**sizes)
    first = next(data.batches(1, signature.batch_unit), None)
    if first is None:
        raise BadData(f"{data.path} has too few samples for the model's fixed batch; add samples")
    return data.shaped({**signature.check_feeds(first), **sizes}) if sizes else first
