"""A small client of the gRPC face, for ``accel infer``: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from accel.errors import BadData
from accel.progress import report
from accel.serve import proto
from accel.serve.inference import Code, ServeError
from accel.serve.tensors import DATATYPES, decode_raw, encode, to_bytes

_CODES = {code.name: code for code in Code}
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class Inference:
    """What a model answered: ``outputs`` by name (``BYTES`` as object arrays), joined over the batches sent."""

    model: str
    version: str
    outputs: Mapping[str, np.ndarray]
    datatypes: Mapping[str, str]
    requests: int

    def to_json(self) -> dict[str, Any]:
        def values(array: np.ndarray) -> Any:
            if array.dtype == object:
                return np.vectorize(lambda v: v.decode("utf-8", "replace"), otypes=[object])(array).tolist()
            finite: Any = array.astype(np.float64) if array.dtype.kind not in "iub" else array
            return [None if v != v or v in (np.inf, -np.inf) else v for v in finite.ravel().tolist()]

        return {
            "model": self.model,
            "version": self.version,
            "requests": self.requests,
            "outputs": {
                name: {"datatype": self.datatypes[name], "shape": list(value.shape), "data": values(value)}
                for name, value in self.outputs.items()
            },
        }


class InferenceClient:
    """``url``: host:port. ``ca``: PEM of who signed the server's certificate, for TLS. ``timeout``: seconds a call may
    take. Every call raises ``ServeError`` with the server's code and text."""

    def __init__(self, url: str, *, token: str | None = None, ca: Path | None = None, timeout: float = 60.0) -> None:
        self._url, self._timeout = url, timeout
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options = [("grpc.max_send_message_length", _INT32_MAX), ("grpc.max_receive_message_length", _INT32_MAX)]
        if ca is None:
            self._channel = grpc.insecure_channel(url, options)
        else:
            try:
                credentials = grpc.ssl_channel_credentials(ca.read_bytes())
            except OSError as error:
                raise BadData(f"can't read {ca}: {error.strerror}; check --tls-ca") from None
            self._channel = grpc.secure_channel(url, credentials, options)

    def call(self, method: str, **fields: Any) -> Any:
        """One unary call of the service by its name."""
        request, response, _ = proto.methods()[method]
        return self._send(method, request(**fields), response)

    def _send(self, method: str, request: Any, response: Any) -> Any:
        stub = self._channel.unary_unary(
            f"/{proto.SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return stub(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            text, code = str(error.details()), error.code()
            if code is grpc.StatusCode.UNAVAILABLE and "connect" in text.lower():
                text = f"no server answers at {self._url}; start one with accel serve, or check --url"
            raise ServeError(_CODES.get(code.name, Code.INTERNAL), text) from None

    def infer(self, model: str, feeds: Mapping[str, np.ndarray], *, version: str = "") -> Inference:
        """One request. Integers and floats of another width are cast to what the model takes."""
        metadata = self.call("ModelMetadata", name=model, version=version)
        return self._infer(model, _fitting(feeds, metadata), version)

    def infer_many(
        self, model: str, feeds: Mapping[str, np.ndarray], *, version: str = "", batch: int = 0
    ) -> Inference:
        """As many requests as it takes: ``batch`` samples each (0: what the model takes at most)."""
        metadata = self.call("ModelMetadata", name=model, version=version)
        largest = int(self.call("ModelConfig", name=model, version=version).config.max_batch_size)
        feeds = _fitting(feeds, metadata)
        rows = min((len(value) for value in feeds.values() if value.ndim), default=0)
        step = min(batch, largest) if batch and largest else largest
        if not largest or rows <= step:
            return self._infer(model, feeds, version)
        found = []
        for start in range(0, rows, step):
            report(f"{model}: {start} of {rows} samples", start / rows)
            found.append(self._infer(model, {k: v[start : start + step] for k, v in feeds.items()}, version))
        joined = {name: np.concatenate([one.outputs[name] for one in found]) for name in found[0].outputs}
        first = found[0]
        return Inference(
            model=model, version=first.version, outputs=joined, datatypes=first.datatypes, requests=len(found)
        )

    def _infer(self, model: str, feeds: Mapping[str, np.ndarray], version: str) -> Inference:
        request = proto.message("ModelInferRequest")(model_name=model, model_version=version)
        for name, value in feeds.items():
            kind = next(d.name for d in DATATYPES.values() if d.numpy == value.dtype)
            request.inputs.add(name=name, datatype=kind, shape=value.shape)
            request.raw_input_contents.append(bytes(encode(value, kind)))
        response = self._send("ModelInfer", request, proto.message("ModelInferResponse"))
        outputs, kinds = {}, {}
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            outputs[tensor.name] = decode_raw(tensor.name, tensor.datatype, tuple(tensor.shape), raw, model)
            kinds[tensor.name] = tensor.datatype
        return Inference(model=model, version=response.model_version, outputs=outputs, datatypes=kinds, requests=1)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fitting(feeds: Mapping[str, np.ndarray], metadata: Any) -> dict[str, np.ndarray]:
    """The arrays that are the model's inputs, in its dtypes. ``BadData`` where one is another kind of thing."""
    found = {}
    for tensor in metadata.inputs:
        if tensor.name not in feeds:
            continue  # optional, or the server says that it isn't
        value, wanted = feeds[tensor.name], DATATYPES[tensor.datatype].numpy
        if wanted.kind == "O":
            value = to_bytes(value)
        elif value.dtype != wanted:
            kinds = {value.dtype.kind, wanted.kind}
            cast = value.astype(wanted) if value.dtype.kind in "iufbV" else None
            if cast is None or not (len(kinds) == 1 or kinds <= {"i", "u", "b"} or wanted.name == "bfloat16"):
                raise BadData(
                    f"input '{tensor.name}' is {value.dtype}, the model takes {tensor.datatype}; save it as that"
                )
            if value.dtype.kind in "iub" and not np.array_equal(cast.astype(value.dtype), value):
                raise BadData(f"input '{tensor.name}' holds numbers that don't fit {tensor.datatype}")
            value = cast
        found[tensor.name] = value
    if not found:
        names = ", ".join(tensor.name for tensor in metadata.inputs)
        raise BadData(f"none of {', '.join(feeds) or 'no arrays'} is an input of the model; it takes: {names}")
    return found


def read_inputs(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name from ``.npz``, or from ``.json`` (an object of nested lists). Nothing is unpickled."""
    return dict(_arrays(path))


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import json
    import zipfile

    try:
        if path.suffix == ".json":
            body = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(body, dict):
                raise BadData(f"{path} has to be an object with one list for each input")
            for name, values in body.items():
                yield name, np.asarray(values)
            return
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadData(f"{path} is a single array; save one for each input with numpy.savez")
            for name in archive.files:
                yield name, archive[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadData(f"can't read {path} ({' '.join(str(error).split())[:120]}); give .npz or .json") from None
