"""Implements the gate that runs after a stage. The gate compares the stage's output with its input on several shapes
and on the user's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel import kept_outputs
from accel.artifact import Artifact
from accel.errors import AccelError, GateFailed, InvalidModel, RunFailed, one_line
from accel.kept_outputs import Run
from accel.progress import report
from accel.runtimes.base import ROUNDED, BaseSession, Session, SessionOptions, default_runtime, detached, open_session
from accel.signature import Signature, new_names
from accel.stage import NOT_FINITE, GateResult, path_sha256

from .compare import INTEGERS_ALONE, Difference, compare, near_integers
from .room import MemoryRoom
from .stream import SampleStream

if TYPE_CHECKING:
    import numpy as np

# The options of sessions that aren't timed. Spinning threads would make them slow beside other work.
PATIENT = SessionOptions(spinning=False)

# Remembers how much memory each artifact takes with a runtime, because a later gate may run only the largest sizes.
_rooms: dict[tuple[str, str], MemoryRoom] = {}


@dataclass(frozen=True, kw_only=True)
class OutputGate:
    """Limits the relative error ||candidate - reference||₂ / ||reference||₂ of every output, at every shape.

    Runs every case of ``signature.cases()``, on random inputs or on ``data``. The samples of ``data`` are cut or
    repeated to the shape of the case. In addition, the first ``samples`` samples of ``data`` are run at their own
    shape. ``seeds`` is the number of different inputs for the first case. Different inputs may take different branches
    of a model.

    ``reference`` is the model to compare with, by default the stage's input. With ``deferred``, nothing is compared,
    because the gate of the next stage has the same ``reference``, and compares the next stage's result with it.
    """

    name: str = "outputs"
    limit: float
    data: Path | None = None
    samples: int = 16
    seeds: int = 3
    reference: Artifact | None = None
    deferred: bool = False

    def to_json(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in ("name", "limit", "samples", "seeds")}
        body["data"] = path_sha256(self.data) if self.data else None
        # Defaults that were added later keep the keys of cached results.
        body |= {"reference": self.reference.digest} if self.reference is not None else {}
        return body | ({"deferred": True} if self.deferred else {})

    def check(self, src: Artifact, out: Artifact) -> list[GateResult]:
        """Returns a result for each output and case. ``passed`` is None if this machine can't run ``out``."""
        if self.deferred:
            return []
        src = self.reference or src
        return self._compared(src, out, lambda: self._feeds(src, out))

    def check_seeds(self, src: Artifact, out: Artifact, seeds: int) -> list[GateResult]:
        """Returns the results for ``seeds - self.seeds`` further inputs, which ``check`` doesn't run.

        If ``self.seeds`` is at least ``seeds``, returns no results.
        """
        src = self.reference or src
        further = range(self.seeds, seeds)
        return self._compared(src, out, lambda: self._seeded(src, out, further)) if further else []

    def check_at(self, src: Artifact, out: Artifact, sizes: Mapping[str, int]) -> list[GateResult]:
        """Returns the results for one case with the dims ``sizes``, also if the gate is deferred."""
        src = self.reference or src
        feeds = what_both_take(src.signature, out.signature).inputs_at(sizes)
        return self._compared(src, out, lambda: iter([(case_name(sizes), feeds)]))

    def _compared(
        self, src: Artifact, out: Artifact, draw: Callable[[], Iterator[tuple[str, dict[str, np.ndarray]]]]
    ) -> list[GateResult]:
        runtime = gate_runtime(out)
        if runtime is None:
            note = f"{out.kind} can't run on this machine; run accel verify on a machine that can"
            return [self._not_run("all", note)]
        results: list[GateResult] = []
        near: dict[int, Mapping[str, np.ndarray]] = {}  # the feeds of results whose integers differ by little
        feeds_by_case = list(draw())
        refused: list[RunFailed] = []
        too_large: dict[str, str] = {}
        # The models are loaded one after the other, because two models and their buffers may not fit into memory.
        with ExitStack() as stack:
            references = list(_references(Outputs(src, gate_runtime(src), stack), feeds_by_case, refused, too_large))
        with ExitStack() as stack:
            candidate = Outputs(out, runtime, stack)
            for index, (case, feeds, wanted) in enumerate(references):
                report("gate", 0.5 + 0.5 * index / len(references))
                if reason := candidate.too_large(feeds):
                    too_large[case] = reason
                    continue
                try:
                    found = candidate.of(feeds)
                except InvalidModel as error:  # the runtime of the stage's result has limits of its own
                    raise GateFailed(
                        f"{runtime} can't load the model that the stage made: {error.reason or one_line(error)}"
                    ) from error
                except Exception as error:
                    if isinstance(error, AccelError) and not isinstance(error, RunFailed):
                        raise
                    reason = one_line(error)
                    raise GateFailed(f"the model that the stage made fails on inputs ({case}): {reason}") from error
                differences = compare(wanted, found)
                integers = near_integers(differences, wanted, self.limit)
                near |= {len(results) + i: feeds for i, one in enumerate(differences) if one.output in integers}
                results += [output_result(self.name, case, one, self.limit) for one in differences]
        # The source model has to accept all random inputs, because random inputs fit the signature. The source model
        # may refuse some of the user's samples, because a sample that is cut to the dim sizes of a test case may become
        # invalid. If the source model refuses all samples, the gate raises the first error.
        if refused and not (self.data and results):
            raise refused[0]
        if near:
            with ExitStack() as stack:
                exact = Outputs(src, gate_runtime(src), stack).integers_alone(next(iter(near.values())))
            for index in near:
                if results[index].output in exact:
                    results[index] = replace(results[index], limit=0.0, passed=False, note=INTEGERS_ALONE)
        return results + [self._not_run(case, note) for case, note in too_large.items()]

    def _not_run(self, case: str, note: str) -> GateResult:
        return GateResult(
            gate=self.name, case=case, output="*", metric="rel_l2", value=None, limit=None, passed=None, note=note
        )

    def _feeds(self, src: Artifact, out: Artifact) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        dataset = SampleStream(self.data, src.signature) if self.data else None
        common = what_both_take(src.signature, out.signature)
        for seed, sizes in enumerate(common.cases()):
            feeds = dataset.shaped(sizes, seed) if dataset else common.inputs_at(sizes)
            yield case_name(sizes), feeds
        yield from self._seeded(src, out, range(1, self.seeds))
        for index, batch in enumerate(dataset.batches(8, self.samples) if dataset else ()):
            yield f"{dataset.path.name if dataset else ''} batch {index}", batch

    def _seeded(self, src: Artifact, out: Artifact, rounds: range) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """For each number in ``rounds``, yields a set of inputs for the first case. Different numbers give different
        inputs."""
        dataset = SampleStream(self.data, src.signature) if self.data else None
        common = what_both_take(src.signature, out.signature)
        cases = common.cases()
        for number in rounds:
            seed = len(cases) - 1 + number
            feeds = dataset.shaped(cases[0], seed) if dataset else common.repeated_inputs(number, cases[0])
            yield f"{case_name(cases[0])} seed {seed}", feeds


def _references(
    reference: Outputs,
    feeds_by_case: Sequence[tuple[str, dict[str, np.ndarray]]],
    refused: list[RunFailed],
    too_large: dict[str, str],
) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Yields each case with the feeds and the outputs of ``reference``. Leaves out the feeds on which the source itself
    fails, because such a failure isn't the fault of the stage. Appends the errors of the source to ``refused``. Also
    leaves out the cases that need too much memory, and adds the reasons to ``too_large``."""
    for index, (case, feeds) in enumerate(feeds_by_case):
        report("gate", 0.5 * index / len(feeds_by_case))
        if reason := reference.too_large(feeds):
            too_large[case] = reason
            continue
        try:
            wanted = reference.of(feeds)
        except RunFailed as error:
            refused.append(error)
        else:
            yield case, feeds, wanted


def output_result(gate: str, case: str, found: Difference, limit: float) -> GateResult:
    """Returns a gate's result for one output, with the relative error and the limit."""
    import math

    return GateResult(
        gate=gate,
        case=case,
        output=found.output,
        metric="rel_l2",
        value=found.rel_l2 if math.isfinite(found.rel_l2) else NOT_FINITE,
        limit=limit,
        passed=found.rel_l2 <= limit,
        note=found.problem,
    )


def what_both_take(src: Signature, out: Signature) -> Signature:
    """Returns a signature with the inputs of ``src`` and the dim ranges of ``out``. A dim that is fixed in one of the
    signatures is fixed in the result."""
    names = new_names(src.inputs, out.inputs)
    bare = Signature(tuple(spec.with_dims(names) for spec in src.inputs))
    return bare.with_dims({d: r for d, r in out.dims.items() if d in bare.dims})


def case_name(sizes: Mapping[str, int]) -> str:
    """Returns the name of a shape in messages, such as ``batch=1, sequence=128``."""
    return ", ".join(f"{dim}={size}" for dim, size in sizes.items()) or "its fixed shape"


def cast_feeds(session: Session, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns ``feeds`` in the dtypes of the session's inputs, such as float16 for a model cast to float16."""
    from accel.signature import numpy_dtype

    dtypes = {spec.name: spec.dtype for spec in session.signature.inputs}
    return {
        name: value
        if dtypes.get(name) in (None, str(value.dtype), "string")
        else value.astype(numpy_dtype(dtypes[name]))
        for name, value in feeds.items()
    }


def gate_runtime(artifact: Artifact, precision: str = "fp32") -> str | None:
    """Returns the name of the runtime that gates use for an artifact, or None if this machine can't run the artifact.
    ``precision`` is the precision of the session. A CPU has no TF32, so the ONNX model of a TF32 session is rounded.

    A 16-bit or fp8 ONNX model runs with rounding after every node. ONNX Runtime's CPU provider would compute 16-bit
    models in float32, which hides overflows. The optimizations of the CPU provider would break fp8 models.
    """
    if artifact.kind == "onnx" and (
        precision == "tf32"
        or {"float16", "bfloat16"} & set(artifact.properties.get("floats", ()))
        or artifact.properties.get("precision") == "fp8"
    ):
        return ROUNDED
    runtime = default_runtime(artifact)
    return runtime.name if runtime.runnable() else None


class Outputs:
    """Returns the outputs of an artifact. Opens a session only for outputs that aren't kept from an earlier run."""

    def __init__(self, artifact: Artifact, runtime: str | None, stack: ExitStack) -> None:
        self._artifact = artifact
        self._runtime = runtime
        self._digest = artifact.content_digest
        self._stack = stack
        self._session: BaseSession | None = None
        self._room = _rooms.setdefault((self._digest, str(runtime)), MemoryRoom())

    def too_large(self, feeds: Mapping[str, np.ndarray]) -> str:
        """Returns the reason why the artifact's run on ``feeds`` doesn't fit into memory, or "" if it fits."""
        reason = self._room.lacks(feeds)
        return reason if reason and kept_outputs.find(self._run(feeds)) is None else ""

    def of(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Casts the feeds to the artifact's dtypes and returns the outputs."""
        run = self._run(feeds)
        if (kept := kept_outputs.find(run)) is not None:
            return kept
        if self._session is None:
            self._session = self._stack.enter_context(open_session(self._artifact, self._runtime, PATIENT))
            self._room.opened()
        with self._room.watched(feeds):
            found = detached(self._session.run(cast_feeds(self._session, feeds)))
        kept_outputs.keep(run, found)
        return found

    def integers_alone(self, feeds: Mapping[str, np.ndarray]) -> frozenset[str]:
        """Returns the names of the outputs that have to be equal (see ``BaseSession.integers_alone``)."""
        session = self._session or self._stack.enter_context(open_session(self._artifact, self._runtime, PATIENT))
        return session.integers_alone(cast_feeds(session, feeds))

    def _run(self, feeds: Mapping[str, np.ndarray]) -> Run:
        return Run.of(self._digest, str(self._runtime), feeds)


def worst_result(results: Sequence[GateResult]) -> GateResult | None:
    """Returns the result with the largest ratio of value to limit, or None if no outputs were compared."""
    compared = [r for r in results if r.value is not None and r.limit]
    return max(compared, key=lambda r: (r.value or 0.0) / (r.limit or 1.0), default=None)
