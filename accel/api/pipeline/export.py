"""Exports the parts of a pipeline and verifies the whole pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from accel import kept_outputs
from accel.artifact import Artifact, manifest_path
from accel.cache import StageCache
from accel.errors import AccelError, BadSource, StageFailed
from accel.optimizer.publish import check_no_decoder, check_out
from accel.proof.gates import OutputGate
from accel.proof.recorded_gate import RecordedGate, write_recorded
from accel.sources.source import Source
from accel.stage import run_stage
from accel.tables.kinds import KINDS

from ..export import to_onnx, to_onnx_config, usual_limit
from .calls import Calls, named, record_calls

if TYPE_CHECKING:
    from accel.signature import Feeds


def export_pipeline(
    src: Artifact,
    *,
    opset: int,
    simplify: bool = True,
    limit: float | None = None,
    cache: StageCache,
    folder: Path | None = None,
) -> Artifact:
    """Exports each part of the pipeline ``src``. Compares the pipeline of the exported parts with ``src``. Writes the
    exported pipeline to ``folder``, or leaves the pipeline in the cache if ``folder`` is None.

    Raises ``BadSource`` if the function never calls a part, calls a part with different kinds of arguments, or changes
    a part. Raises the errors of ``accel.export`` with the name of the part.
    """
    from accel.sources.pipeline import pipeline_in
    from accel.sources.torch.arguments import class_name
    from accel.sources.torch.call import NamedModule, run_named
    from accel.sources.torch.fingerprint import state_sha256
    from accel.sources.torch.source import module_of

    module = module_of(src)
    pipeline = pipeline_in(module)
    assert pipeline is not None, "the source is a pipeline"
    if folder is not None:
        check_folders(folder, pipeline.names)
    whole = NamedModule(module, [spec.name for spec in src.signature.inputs])
    before = state_sha256(module)
    modules = pipeline.by_name()

    def run(feeds: Feeds) -> None:
        # The gate of the whole pipeline runs the modules on the same inputs.
        found = run_named(whole, src.signature, feeds)
        names = [spec.name for spec in src.signature.outputs]
        if len(found) == len(names):
            outputs = dict(zip(names, found.values(), strict=True))
            kept_outputs.keep(kept_outputs.Run.of(src.content_digest, "torch", feeds), outputs)

    calls = record_calls(modules, pipeline.recorded_by, run, _runs(src))
    if state_sha256(module) != before:
        raise BadSource(
            f"the pipeline {class_name(pipeline)} changes the weights or buffers of a part, but exported parts are "
            "constant; return the new values from the part, and pass them to its next call"
        )
    with TemporaryDirectory(prefix="accel-") as temporary:
        parts: dict[str, Artifact] = {}
        for name, part in modules.items():
            given = write_recorded(_spread(calls[name]), Path(temporary) / name, "call")
            try:
                parts[name] = _export_part(part, calls[name], given, opset, simplify, limit, cache)
            except AccelError as error:
                raise named(error, name) from error
        example = write_recorded([_example(src)] if _example(src) else [], Path(temporary) / "example", "example")
        return joined(src, parts, limit or usual_limit(src), cache, folder, example)


def check_folders(folder: Path, parts: Iterable[str]) -> None:
    """Raises ``CannotWrite`` if a file that accel did not make would be overwritten in ``folder`` or in the folder of a
    part."""
    for each in (folder, *(folder / name for name in parts)):
        check_out(each, "")
        check_no_decoder(each)


def joined(
    src: Artifact,
    parts: Mapping[str, Artifact],
    limit: float,
    cache: StageCache,
    folder: Path | None = None,
    example: Path | None = None,
) -> Artifact:
    """Joins ``parts`` and the function of ``src`` to one artifact, and verifies the artifact against ``src`` end to
    end."""
    from accel.converters.to_others.pipeline_from_parts import PipelineFromPartsConfig

    about: Mapping[str, Any] = src.source["pipeline"]
    manifests = {name: manifest_path(part.path) for name, part in parts.items()}
    config = PipelineFromPartsConfig(function=about["function"], sha256=about["sha256"], parts=manifests)
    gates = [OutputGate(limit=limit), *([RecordedGate(limit=limit, data=example)] if example else [])]
    out = folder / KINDS["pipeline"].main_file if folder else None
    return run_stage("pipeline_from_parts", src, config, gates=gates, cache=cache, out=out)


def _runs(src: Artifact) -> Iterator[tuple[Mapping[str, int], Feeds]]:
    """Yields the example, and random inputs at each shape that the pipeline's gate checks."""
    if example := _example(src):
        yield src.signature.check_feeds(example), example
    for sizes in src.signature.cases():
        yield sizes, src.signature.inputs_at(sizes)


def _example(src: Artifact) -> dict[str, Any]:
    """Returns the user's example as a dict by input name, or an empty dict if the example doesn't fit the declared
    inputs."""
    from accel.sources.torch.call import to_array
    from accel.sources.torch.live import kept_example

    found = {name: to_array(value) for name, value in kept_example(src.path).items()}
    try:
        src.signature.check_feeds(found)
    except AccelError:
        return {}
    return found


def _spread(calls: Calls) -> list[dict[str, Any]]:
    """Returns a sample of the recorded calls: the first call and every n-th call after it."""
    step = max(1, (len(calls.kept) - 1) // 7)
    return calls.kept[::step]


def _export_part(
    part: Any,
    calls: Calls,
    given: Path | None,
    opset: int,
    simplify: bool,
    limit: float | None,
    cache: StageCache,
) -> Artifact:
    source = Source(part, example=calls.largest, dynamic=calls.dynamic())
    opened = source.open()
    limit = limit or usual_limit(opened)
    gates = [RecordedGate(limit=limit, data=given)] if given else []
    made = to_onnx(opened, to_onnx_config("torch", opset=opset), simplify, limit, cache, gates=gates)
    if made.manifest is None:
        raise StageFailed("the exported part has no manifest; export again")
    return made
