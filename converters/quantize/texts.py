"""Feeds texts to a decoder for calibration, each from an empty cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from accel.errors import BadData, UnsupportedHere
from accel.progress import report
from accel.signature import Signature
from accel.signature.decoder import IDS, MASK, POSITIONS, Cache

from ..graph.write import write_onnx
from .stage import Task, calibration_feeds

# The name of the token ids [texts, length] in the file of the texts.
TEXTS = "ids"
# The samples that run at once.
_SAMPLES_AT_ONCE = 16


def write_texts(texts: np.ndarray, path: Path) -> None:
    """Writes the token ids ``texts`` [texts, length] to a file that ``text_feeds`` reads."""
    np.savez_compressed(path, ids=texts.astype(np.int64))


def text_feeds(task: Task) -> Iterator[dict[str, np.ndarray]]:
    """Yields the inputs of each text in the config's ``data``, an .npz file with the token ids [texts, length].

    Raises ``UnsupportedHere`` if the model is no decoder with a cache, and ``BadData`` if the file holds no texts.
    """
    if Cache.of(task.signature) is None or task.config.data is None:
        raise UnsupportedHere(f"{task.config.mode} is for decoders with a cache, which are calibrated on texts")
    return feeds_of_texts(task.signature, task.config.data, task.config.samples)


def feeds_of_texts(signature: Signature, path: Path, samples: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the inputs of at most ``samples`` texts in the file ``path``, for a decoder with this signature. Raises
    ``BadData`` if the file holds no texts."""
    layout = Cache.of(signature)
    assert layout is not None, "the model is a decoder"
    with np.load(path, allow_pickle=False) as file:
        texts = file[TEXTS] if TEXTS in file else np.zeros(0)
    if texts.ndim != 2 or not texts.size or texts.dtype != np.int64:
        raise BadData(f"{path} holds no token ids [texts, length] named {TEXTS}")
    takes = {spec.name for spec in signature.inputs}
    count = min(len(texts), samples)
    for number, text in enumerate(texts[:count]):
        report(f"calibrating, text {number + 1} of {count}", number / count)
        ids = text[None]
        every = {IDS: ids, MASK: np.ones_like(ids), POSITIONS: np.arange(ids.shape[1])[None], **layout.empty(1)}
        yield {name: value for name, value in every.items() if name in takes}


def observed(
    model: onnx.ModelProto, names: Sequence[str], task: Task, batches: Iterable[dict[str, np.ndarray]] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the tensors ``names`` of ``model``, computed by ONNX Runtime, for each of ``batches``, by default for each
    text. A name may be that of an input."""
    import onnxruntime

    path = task.path.with_name("observed.onnx")
    own = list(model.graph.output)
    del model.graph.output[:]
    inputs = {value.name for value in model.graph.input}
    inner = [name for name in names if name not in inputs]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inner or [own[0].name])
    write_onnx(model, path)
    del model.graph.output[:]
    model.graph.output.extend(own)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for feeds in batches if batches is not None else text_feeds(task):
        found = dict(zip(inner, session.run(inner, feeds), strict=True)) if inner else {}
        yield {name: found[name] if name in found else feeds[name] for name in names}


def texts_or_samples(task: Task) -> Iterator[dict[str, np.ndarray]]:
    """Yields the inputs of each text if the model is a decoder and its data is a file of texts, else batches of
    samples."""
    path = task.config.data
    if Cache.of(task.signature) is not None and path is not None and path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as file:
            if TEXTS in file:
                return text_feeds(task)
    return calibration_feeds(task, _SAMPLES_AT_ONCE)


def describe_other_domains(model: onnx.ModelProto, task: Task) -> None:
    """Adds the dtypes and ranks of the tensors that operators outside ONNX compute, because onnx infers none of them.
    Without dtypes, NNCF loses the edges between nodes."""
    names = [name for node in model.graph.node if node.domain not in ("", "ai.onnx") for name in node.output if name]
    names = [name for name in names if name not in {value.name for value in model.graph.output}]
    for name, value in next(observed(model, names, task)).items() if names else ():
        dims = [f"{name}/{axis}" for axis in range(value.ndim)]
        dtype = helper.np_dtype_to_tensor_dtype(value.dtype)
        model.graph.value_info.append(helper.make_tensor_value_info(name, dtype, dims))
