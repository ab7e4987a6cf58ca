"""Loads one version of a model: opens the artifact, completes the config, and creates and warms up the executor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from accel.artifact import Artifact
from accel.errors import AccelError, BadRepository, one_line
from accel.machine import available_cores
from accel.runtimes.base import BaseSession, Session, default_runtime, get_runtime, open_session
from accel.signature import Signature
from accel.sources.onnx.file import ROWS_SHARE_SCALES

from ..generate.own_loop import declare_own_loop
from ..generate.token_loop import TokenLoopSession, token_loop
from ..protocol.inference import Executor, ServeError
from ..protocol.tensors import DATATYPES, decode_raw, to_strings
from ..scheduling.executor import make_executor
from ..scheduling.options import Scheduling
from ..scheduling.profiles import read_profiles
from ..scheduling.rate_limit import RateLimiter
from ..scheduling.response_cache import ResponseCache
from . import config as model_config
from .config import ModelConfig
from .devices import runtime_for
from .ensembles.config import Get, check_steps, complete_ensemble, is_ensemble, make_ensemble, step_labels
from .files import ModelFolder, Trust
from .model import ServedModel
from .optional_inputs import with_optional_inputs
from .pinning import PinnedSession, cores_of
from .python_code import is_python, load_python
from .shapes import ReshapingExecutor, read_reshapes, with_batch_dim

log = logging.getLogger("accel.serve")
WARM_UP_FAILED = "warm-up failed"
WARM_UP_FILES = "warmup"  # Triton's folder for the data of model_warmup, next to the version folders
_ALONE = (
    "dynamic int8 takes one scale for all rows of a batch, so callers would change each other's answers; add "
    "dynamic_batching { } to config.pbtxt to batch anyway"
)

MakeExecutor = Callable[..., Executor]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options for loading models.

    ``threads`` is the number of threads of a session if the config sets no number. If ``threads`` is 0, ``_share``
    chooses the number. ``cores`` is the number of cores that a model's sessions share, or 0 for all cores of this
    process. ``make`` is the function that creates the executor. ``get`` looks up the models of an ensemble. ``cache``
    is the response cache that all models share. ``limiter`` limits the resources that models share. ``host_policies``
    maps the name of a host policy to the cores for an instance group.
    """

    trust: Trust = field(default_factory=Trust)
    threads: int = 0
    cores: int = 0
    warm_up: bool = True
    make: MakeExecutor = make_executor
    get: Get | None = None
    cache: ResponseCache | None = None
    limiter: RateLimiter = field(default_factory=RateLimiter)
    host_policies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def load_version(
    folder: ModelFolder, version: str, loading: Loading, override: ModelConfig | None = None, files: Any = None
) -> ServedModel:
    """Loads one version. ``override`` is a config that replaces ``config.pbtxt``. ``files`` is the fingerprint of the
    version's files."""
    if override is not None:
        config, batch_given = type(override)(), True
        config.CopyFrom(override)
    else:
        config, batch_given = folder.config()
    _supported(config, folder.name)
    if is_ensemble(config):
        return _load_ensemble(folder, version, loading, config, files)
    if is_python(config, folder, version):
        return load_python(folder, version, loading, config, files, _sample)
    artifact = with_batch_dim(config, folder.open(version, config, loading.trust))
    artifact = with_optional_inputs(config, folder.name, artifact)
    runtime = runtime_for(config, folder.name, artifact)
    declare_own_loop(config, artifact)
    loop = token_loop(config, folder.name, artifact.signature)
    signature = loop.offered(artifact.signature) if loop else artifact.signature
    gpu = (get_runtime(runtime) if runtime else default_runtime(artifact)).needs_gpu
    alone = bool(artifact.properties.get(ROWS_SHARE_SCALES))
    model_config.complete(config, folder.name, signature, artifact.kind, batch_given=batch_given, gpu=gpu, alone=alone)
    if alone and config.max_batch_size and not config.HasField("dynamic_batching"):
        log.info("requests not batched", extra={"model": folder.name, "reason": _ALONE})
    scheduling = model_config.scheduling(config, signature, folder.path, read_profiles(artifact.properties))
    threads = scheduling.threads or loading.threads or (0 if gpu else _share(loading.cores, scheduling.instances))
    instances = iter(cores_of(config, loading.host_policies))

    def opened(threads: int = threads) -> Session:
        session = open_session(artifact, runtime, {"threads": threads} if threads else {})
        try:
            if loading.warm_up:
                _warm_up(session, config, artifact, scheduling.max_batch_size, folder)
        except BaseException:
            session.close()
            raise
        return session

    def next_instance() -> Session:
        cores = next(instances)
        session = opened() if not cores else PinnedSession(partial(opened, scheduling.threads or len(cores)), cores)
        return cast(
            "Session", TokenLoopSession(cast("Session", session), loop, artifact.signature) if loop else session
        )

    reshapes = read_reshapes(config)
    executor = loading.make(
        signature,
        scheduling,
        next_instance,
        name=folder.name,
        version=version,
        cache=loading.cache,
        limiter=loading.limiter,
    )
    if any(reshapes):
        batched = config.max_batch_size > 0
        executor = ReshapingExecutor(executor, *reshapes, name=folder.name, batched=batched)
    return ServedModel(
        name=folder.name,
        version=version,
        config=config,
        signature=signature,
        scheduling=scheduling,
        executor=executor,
        labels=folder.labels(config),
        files=files,
        ranges=artifact.integer_ranges,
    )


def _share(cores: int, instances: int) -> int:
    """Returns the number of threads of each session. Sessions that run at the same time share the cores.

    Returns 0 if a single session may use all cores, so that the runtime or the manifest chooses the number of threads.
    """
    if not cores and instances == 1:
        return 0
    return max(1, (cores or available_cores()) // instances)


def _load_ensemble(folder: ModelFolder, version: str, loading: Loading, config: ModelConfig, files: Any) -> ServedModel:
    if loading.get is None:
        raise BadRepository(f"ensemble '{folder.name}' can't be loaded without the repository of its models")
    signature = complete_ensemble(config, folder.name)
    executor = make_ensemble(config, signature, loading.get, version)
    check_steps(config, loading.get)
    return ServedModel(
        name=folder.name,
        version=version,
        config=config,
        signature=signature,
        scheduling=Scheduling(max_batch_size=config.max_batch_size),
        executor=executor,
        labels={**step_labels(config, loading.get), **folder.labels(config)},
        files=files,
        takes_bytes=True,  # whether a string has to be text depends on the step that takes it
    )


# Maps each unsupported field of a config to the advice for users. The server refuses unsupported fields, because
# ignoring them would change the model's answers.
_REFUSED = {
    "batch_input": "send those inputs with the request",
    "batch_output": "let the model give its outputs batch by batch",
    "model_operations": "build the operations into the model",
    "model_repository_agents": "remove the agents; manifests tell which files belong to a model",
}


def _supported(config: ModelConfig, name: str) -> None:
    for given, _ in config.ListFields():
        if given.name in _REFUSED:
            raise BadRepository(f"model '{name}': the field {given.name} is not supported; {_REFUSED[given.name]}")


def _warm_up(session: BaseSession, config: ModelConfig, artifact: Artifact, largest: int, folder: ModelFolder) -> None:
    """Warms up ``session`` with the samples of the config's ``model_warmup``. Without samples, the model runs once at
    the smallest and once at the largest batch size."""
    if config.model_warmup:
        for sample in config.model_warmup:
            feeds = _sample(sample, config, artifact.signature, folder)
            for _ in range(max(1, sample.count)):
                session.run(feeds)
        return
    batch = artifact.signature.batch_dim
    sizes: list[dict[str, int]] = [{}]
    if batch is not None and largest:
        rows = model_config.batch_range(artifact.signature)
        sizes = [{batch: size} for size in sorted({rows.min, rows.down(largest)})]
    for size in sizes:
        feeds = session.example_inputs(**size)
        try:
            session.run(feeds)
        except (AccelError, RuntimeError) as error:
            # A model that refuses random inputs can still be served.
            log.warning(WARM_UP_FAILED, extra={"model": config.name, "reason": one_line(error)})


def _sample(sample: Any, config: ModelConfig, signature: Signature, folder: ModelFolder) -> dict[str, np.ndarray]:
    """Returns the feeds of one sample of ``model_warmup``, in the shapes that the model takes."""
    rng = np.random.default_rng(0)
    reshapes = read_reshapes(config)[0]
    feeds = {}
    for name, given in sample.inputs.items():
        kind = DATATYPES[model_config.datatype(given)]
        rows = (sample.batch_size,) if config.max_batch_size else ()
        shape = (*rows, *(reshapes[name].inward(given.dims) if name in reshapes else given.dims))
        if given.WhichOneof("input_data_type") == "input_data_file":
            feeds[name] = _from_file(config, folder, name, kind.name, shape, given.input_data_file)
        elif kind.name == "BYTES":
            feeds[name] = np.full(shape, "", dtype=object)
        elif given.random_data:
            feeds[name] = rng.integers(0, 2, size=shape).astype(kind.numpy)
        else:
            feeds[name] = np.zeros(shape, dtype=kind.numpy)
    missing = [spec.name for spec in signature.inputs if spec.name not in feeds and not spec.optional]
    if missing:
        raise BadRepository(f"model '{config.name}': the warm-up sample '{sample.name}' lacks the input {missing[0]!r}")
    return feeds


def _from_file(
    config: ModelConfig, folder: ModelFolder, name: str, datatype: str, shape: tuple[int, ...], file: str
) -> np.ndarray:
    """Returns the input that a file in the model's folder ``warmup`` holds in the protocol's raw encoding."""
    where = f"model '{config.name}': the warm-up file {WARM_UP_FILES}/{file}"
    if Path(file).name != file:
        raise BadRepository(f"{where} has to be a plain file name")
    try:
        found = decode_raw(name, datatype, shape, (folder.path / WARM_UP_FILES / file).read_bytes(), config.name)
        return to_strings(name, found, config.name) if datatype == "BYTES" else found
    except OSError as error:
        raise BadRepository(f"{where} can't be read ({error.strerror}); put the file into the model's folder") from None
    except ServeError as error:
        raise BadRepository(f"{where} doesn't fit the input '{name}': {error}") from None
