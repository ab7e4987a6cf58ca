"""Loads one version of a model that is Python code. Its config or the code itself declares the inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel.errors import BadRepository
from accel.signature import Signature

from ..python_models.executor import FORMS
from ..python_models.session import PythonProcess, PythonSession
from ..scheduling.options import Scheduling
from . import config as model_config
from .config import ModelConfig
from .files import CONFIG, PYTHON_FILE, ModelFolder
from .model import ServedModel
from .sequence_config import server_tensors
from .shapes import ReshapingExecutor, read_reshapes

if TYPE_CHECKING:
    from accel.runtimes.base import Session

    from .loading import Loading

_KIND_GPU = 1  # in ModelInstanceGroup of Triton's config

# Returns the feeds of one sample of ``model_warmup``.
Sample = Callable[[Any, ModelConfig, Signature, ModelFolder], Mapping[str, Any]]


def is_python(config: ModelConfig, folder: ModelFolder, version: str) -> bool:
    """Tells whether a model is Python code, by its config or by the only file that could be the model."""
    if config.backend or config.platform:
        return bool("python" in (config.backend, config.platform))
    there = (folder.version_folder(version) / PYTHON_FILE).is_file()
    return there and folder.model_file(version, config.default_model_filename)[0] is None


def load_python(
    folder: ModelFolder, version: str, loading: Loading, config: ModelConfig, files: Any, sample: Sample
) -> ServedModel:
    """Loads one version. ``files`` is the fingerprint of the version's files. ``sample`` makes the feeds of a warm-up.

    Raises ``BadRepository`` if the code isn't allowed to run or its config is incomplete, and ``InvalidModel`` if the
    code fails.
    """
    name = folder.name
    file = _code(folder, version, loading, config)
    config.name, config.backend = name, "python"
    first = PythonProcess(name, file)
    instances = _Instances(folder, version, file, first)
    try:
        given = first.call("complete", config=model_config.to_json(config))["config"]
        config = model_config.parse_json(json.dumps(given), f"the config that {file.name} completed")
        if not config.output:
            raise BadRepository(
                f"model '{name}': Python code needs input and output in {CONFIG}, or a method auto_complete_config"
            )
        signature = _signature(config)
        model_config.complete(config, name, signature, "python", batch_given=True)
        scheduling = replace(model_config.scheduling(config, signature, folder.path), lengths=None)
        executor = loading.make(
            signature, scheduling, lambda: instances.open(config, signature, scheduling, sample), name=name,
            version=version, cache=loading.cache, limiter=loading.limiter, forms=FORMS,
        )  # fmt: skip
    finally:
        instances.close()
    reshapes = read_reshapes(config)
    if any(reshapes):
        executor = ReshapingExecutor(executor, *reshapes, name=name, batched=config.max_batch_size > 0)
    return ServedModel(
        name=name,
        version=version,
        config=config,
        signature=signature,
        scheduling=scheduling,
        executor=executor,
        labels=folder.labels(config),
        files=files,
        takes_bytes=True,
    )


def _code(folder: ModelFolder, version: str, loading: Loading, config: ModelConfig) -> Path:
    """Returns the file with the code. Raises ``BadRepository`` if the server may not run it."""
    if not loading.trust.allow_python:
        raise BadRepository(
            f"model '{folder.name}' is Python code, which may do anything on this machine; pass --allow-python-backend "
            "to run it, or export the model"
        )
    if "EXECUTION_ENV_PATH" in config.parameters:
        raise BadRepository(
            f"model '{folder.name}': EXECUTION_ENV_PATH is not supported; install the packages beside the server, and "
            "remove the parameter"
        )
    named = config.default_model_filename or PYTHON_FILE
    if Path(named).name != named:
        raise BadRepository(f"model '{folder.name}': default_model_filename {named!r} has to be a plain file name")
    file = folder.version_folder(version) / named
    if not file.is_file():
        raise BadRepository(f"model '{folder.name}' version {version} has no file {named}")
    return file


class _Instances:
    """Opens the sessions of a model. The first session gets the process that completed the config."""

    def __init__(self, folder: ModelFolder, version: str, file: Path, first: PythonProcess) -> None:
        self._folder, self._version, self._file = folder, version, file
        self._first: PythonProcess | None = first
        self._count = 0

    def open(self, config: ModelConfig, signature: Signature, scheduling: Scheduling, sample: Sample) -> Session:
        """Returns a session that is initialized and warmed up."""
        name, group = self._folder.name, config.instance_group[0]
        arguments = {
            "model_config": json.dumps(model_config.to_json(config)),
            "model_instance_kind": "GPU" if group.kind == _KIND_GPU else "CPU",
            "model_instance_device_id": str(next(iter(group.gpus), 0)),
            "model_instance_name": f"{name}_0_{self._count}",
            "model_repository": str(self._folder.path.absolute()),
            "model_version": self._version,
            "model_name": name,
        }
        self._count += 1
        process, self._first = self._first, None
        session = PythonSession(name, self._file, signature, arguments, first=process)
        try:
            for one in config.model_warmup if not scheduling.decoupled else ():
                feeds = sample(one, config, signature, self._folder)
                for _ in range(max(1, one.count)):
                    session.run(feeds)
        except BaseException:
            session.close()
            raise
        return cast("Session", session)

    def close(self) -> None:
        """Ends the first process if no session has it."""
        if self._first is not None:
            self._first.close()


def _signature(config: ModelConfig) -> Signature:
    """Returns the signature that the config declares. Python code may take optional inputs, because it sees which
    inputs a request has."""
    found = model_config.declared_signature(config, f"model '{config.name}'", scalars=True)
    optional = {tensor.name for tensor in config.input if tensor.optional}
    inputs, outputs = server_tensors(config)
    listed = [replace(spec, optional=spec.name in optional) for spec in found.inputs]
    return Signature((*listed, *inputs), (*found.outputs, *outputs))
