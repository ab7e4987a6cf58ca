"""Implements a small gRPC client for ``accel infer``. The client takes and returns arrays.

This module doesn't use tritonclient, because tritonclient would be one more dependency and would do only a small part
of the work. The package tritonclient doesn't split arrays into batches, cast arrays to the model's dtypes, join the
outputs or explain a wrong address. This client needs grpcio and the protocol's messages, which are installed with the
server.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from accel.errors import BadData, UsageError, one_line
from accel.progress import report
from accel.spelling import is_command_line, option

from ..protocol import messages as proto
from ..protocol.inference import Code, ServeError
from ..protocol.tensors import DATATYPES, decode_raw, encode, to_bytes

_CODES = {code.name: code for code in Code}
_INT32_MAX = (1 << 31) - 1
_ASKING_SECONDS = 2.0
_SCORES = ("FP32", "FP16", "BF16", "FP64")


@dataclass(frozen=True, kw_only=True)
class ScoredClass:
    """One class of a sample. ``label`` is "" if the model has no labels."""

    score: float
    index: int
    label: str = ""


def _scored(text: bytes) -> ScoredClass:
    score, index, *label = text.decode("utf-8", "replace").split(":", 2)
    return ScoredClass(score=float(score), index=int(index), label="".join(label))


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A model's answer. ``outputs`` maps the name of each output to an array that joins the results of all requests.
    Outputs of type ``BYTES`` are object arrays. ``requests`` is the number of requests. ``classified`` is True if the
    outputs are strings that name classes."""

    model: str
    version: str
    outputs: Mapping[str, np.ndarray]
    datatypes: Mapping[str, str]
    requests: int
    classified: bool = False

    def classes(self) -> dict[str, list[list[ScoredClass]]]:
        """Returns the classes of each sample for each output, highest score first. Returns {} if no classes were
        requested."""
        if not self.classified:
            return {}
        return {
            name: [[_scored(text) for text in row] for row in value.reshape(-1, value.shape[-1])]
            for name, value in self.outputs.items()
        }

    def to_json(self) -> dict[str, Any]:
        def values(array: np.ndarray) -> Any:
            if array.dtype == object:
                return np.vectorize(lambda v: v.decode("utf-8", "replace"), otypes=[object])(array).tolist()
            finite: Any = array.astype(np.float64) if array.dtype.kind not in "iub" else array
            return [None if v != v or v in (np.inf, -np.inf) else v for v in finite.ravel().tolist()]

        rows = {name: [[asdict(one) for one in row] for row in found] for name, found in self.classes().items()}
        return {
            "model": self.model,
            "version": self.version,
            "requests": self.requests,
            **({"classes": rows} if rows else {}),
            "outputs": {
                name: {"datatype": self.datatypes[name], "shape": list(value.shape), "data": values(value)}
                for name, value in self.outputs.items()
            },
        }


class InferenceClient:
    """Holds a connection to one server.

    ``url`` is host:port, and ``token`` is a bearer token. ``ca`` is the PEM file with the CA of the server's
    certificate, and turns TLS on. ``certificate`` and ``key`` are PEM files that identify the client. ``timeout`` is
    the longest time of a call in seconds. A failed call raises ``ServeError`` with the server's code and text. Raises
    ``UsageError`` if some of the TLS files are missing.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        if "://" in url:
            kind, _, url = url.partition("://")
            if kind.lower() not in ("grpc", "grpcs"):
                raise UsageError(f"{kind}://{url} is no gRPC address; give HOST:PORT with the server's --grpc-port")
            url = url.rstrip("/")
        self._url, self._timeout, self._tls = url, timeout, ca is not None
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options = [("grpc.max_send_message_length", _INT32_MAX), ("grpc.max_receive_message_length", _INT32_MAX)]
        if (certificate is None) != (key is None) or (certificate is not None and ca is None):
            raise UsageError("a client's certificate needs --tls-certificate, --tls-key and --tls-ca")
        if ca is None:
            self._channel = grpc.insecure_channel(url, options)
        else:
            shown = (_pem(key, "--tls-key"), _pem(certificate, "--tls-certificate")) if certificate and key else ()
            credentials = grpc.ssl_channel_credentials(_pem(ca, "--tls-ca"), *shown)
            self._channel = grpc.secure_channel(url, credentials, options)

    def call(self, method: str, **fields: Any) -> Any:
        """Calls a unary method of the service by its name and returns its response message."""
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
            raise self._failure(error) from None

    def _failure(self, error: Any) -> ServeError:
        text, code = str(error.details()), error.code()
        if code is grpc.StatusCode.UNAVAILABLE and (found := self._who_answers()):
            text = found
        if code is grpc.StatusCode.UNAUTHENTICATED:
            text = f"the server needs a valid token; {_token_advice()}"
        return ServeError(_CODES.get(code.name, Code.INTERNAL), text)

    def _who_answers(self) -> str:
        """Sends a plain HTTP request to the address. Returns the reason why gRPC fails at the address, or "" if no
        reason is found."""
        host, _, port = self._url.rpartition(":")
        if not host and not port.isdigit():
            return f"{self._url} has no port; give HOST:PORT with the server's --grpc-port (usually 8001)"
        try:
            with socket.create_connection((host.strip("[]"), int(port)), min(self._timeout, _ASKING_SECONDS)) as made:
                made.sendall(b"GET / HTTP/1.0\r\n\r\n")
                begins = made.recv(5)
        except (TimeoutError, ConnectionResetError):
            return ""
        except (OSError, ValueError):
            return f"no server answers at {self._url}; start one with accel serve, or check --url"
        if begins == b"HTTP/":
            return f"{self._url} speaks HTTP, not gRPC; give the server's gRPC port (--url {host}:8001, usually)"
        if begins[:1] == b"\x15" or (not begins and not self._tls):  # TLS sent an alert or closed the connection
            return f"{self._url} doesn't speak gRPC in the clear; if it uses TLS, pass --tls-ca, else check --url"
        return f"{self._url} doesn't use TLS; leave out --tls-ca" if self._tls and begins else ""

    def infer_many(
        self, model: str, feeds: Mapping[str, np.ndarray], *, version: str = "", batch: int = 0, classes: int = 0
    ) -> Inference:
        """Sends ``feeds`` in requests of ``batch`` samples and joins the outputs. A ``batch`` of 0 means the model's
        largest batch.

        Casts the arrays to the model's dtypes, such as float64 to float32 or int64 to int32. If ``classes`` is above 0,
        requests the top ``classes`` classes of each sample instead of the outputs. Raises ``BadData`` if the arrays
        don't fit the model.
        """
        metadata, config = self._describe(model, version)
        largest = int(config.max_batch_size)
        feeds = _fitting(feeds, metadata)
        rows = min((len(value) for value in feeds.values() if value.ndim), default=0)
        step = min(batch, largest) if batch and largest else largest
        if not largest or rows <= step:
            return self._infer(metadata, feeds, version, classes)
        batches = (({k: v[start : start + step] for k, v in feeds.items()}, step) for start in range(0, rows, step))
        return self._joined(metadata, batches, rows, "samples", version, classes)

    def infer_images(
        self,
        model: str,
        files: Sequence[Path],
        *,
        version: str = "",
        batch: int = 0,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        classes: int | None = None,
    ) -> Inference:
        """Reads image files with ``ImageInput``, and sends each file as one sample. The docstring of ``infer_many``
        explains ``batch``.

        With ``classes=None``, requests the top three classes if the model has a single output with one score per class.
        """
        from .images import image_input

        metadata, config = self._describe(model, version)
        image = image_input(metadata, config, mean, std)
        if classes is None:
            ranks = [len(output.shape) for output in metadata.outputs]
            classes = 3 if ranks == [2 if image.batched else 1] and metadata.outputs[0].datatype in _SCORES else 0
        largest = int(config.max_batch_size) or 1
        step = (min(batch, largest) if batch else largest) if image.batched else 1
        batches = (
            ({image.name: np.stack(pixels) if image.batched else pixels[0]}, len(pixels))
            for pixels in _same_shape(map(image.read, files), step)
        )
        return self._joined(metadata, batches, len(files), "images", version, classes, add_batch=not image.batched)

    def _describe(self, model: str, version: str) -> tuple[Any, Any]:
        """Returns the model's ``ModelMetadataResponse`` and ``ModelConfig``."""
        metadata = self.call("ModelMetadata", name=model, version=version)
        return metadata, self.call("ModelConfig", name=model, version=version).config

    def _joined(
        self,
        metadata: Any,
        batches: Iterable[tuple[dict[str, np.ndarray], int]],
        total: int,
        what: str,
        version: str,
        classes: int,
        *,
        add_batch: bool = False,
    ) -> Inference:
        """Sends one request per batch and joins the outputs. Each item of ``batches`` is a pair: the arrays of one
        request, and the number of the request's samples."""
        found: list[Inference] = []
        done = 0
        # A log prints a line whenever the progress text changes, so the text has the total number of samples and not
        # the number that is already sent.
        sending = f"{metadata.name}: sending {total} {what}"
        report(sending, 0.0)
        for feeds, count in batches:
            found.append(self._infer(metadata, feeds, version, classes))
            done += count
            report(sending, min(1.0, done / total))
        first = found[0]
        try:
            joined = {
                name: np.concatenate([one.outputs[name][None] if add_batch else one.outputs[name] for one in found])
                for name in first.outputs
            }
        except ValueError:
            raise BadData(
                f"model '{metadata.name}' gave outputs of different shapes for different {what}; send {what} of equal "
                "shape"
            ) from None
        return replace(first, outputs=joined, requests=len(found))

    def _infer(self, metadata: Any, feeds: Mapping[str, np.ndarray], version: str, classes: int) -> Inference:
        request = _request(metadata.name, feeds, version)
        if classes:
            for output in metadata.outputs:
                request.outputs.add(name=output.name).parameters["classification"].int64_param = classes
        response = self._send("ModelInfer", request, proto.message("ModelInferResponse"))
        return Inference(
            model=metadata.name,
            version=response.model_version,
            outputs=_outputs(response),
            datatypes={tensor.name: tensor.datatype for tensor in response.outputs},
            requests=1,
            classified=bool(classes),
        )

    def stream(
        self, model: str, feeds: Mapping[str, np.ndarray], *, version: str = ""
    ) -> Iterator[dict[str, np.ndarray]]:
        """Sends one request to a model that gives several responses, and yields the outputs of each response when it
        comes. If the caller closes the iterator, the server ends the stream.

        Casts the arrays as ``infer_many`` does. Raises ``BadData`` if the arrays don't fit the model, and
        ``ServeError`` if the server refuses the request or the stream fails.
        """
        sent = _request(model, _fitting(feeds, self._describe(model, version)[0]), version)
        request, response, _ = proto.methods()["ModelStreamInfer"]
        stub = self._channel.stream_stream(
            f"/{proto.SERVICE}/ModelStreamInfer",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        answers = stub(iter([sent]), timeout=self._timeout, metadata=self._metadata)
        try:
            for answer in answers:
                if answer.error_message:
                    raise ServeError(Code.INTERNAL, answer.error_message)  # the text is all that a stream tells
                yield _outputs(answer.infer_response)
        except grpc.RpcError as error:
            raise self._failure(error) from None
        finally:
            answers.cancel()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _request(model: str, feeds: Mapping[str, np.ndarray], version: str) -> Any:
    request = proto.message("ModelInferRequest")(model_name=model, model_version=version)
    for name, value in feeds.items():
        kind = next(d.name for d in DATATYPES.values() if d.numpy == value.dtype)
        request.inputs.add(name=name, datatype=kind, shape=value.shape)
        request.raw_input_contents.append(bytes(encode(value, kind)))
    return request


def _outputs(response: Any) -> dict[str, np.ndarray]:
    return {
        tensor.name: decode_raw(tensor.name, tensor.datatype, tuple(tensor.shape), raw, response.model_name)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _token_advice() -> str:
    """Returns the advice for a client without a valid token."""
    return f"pass {option('token')}" + (" or set ACCEL_TOKEN" if is_command_line() else "")


def _same_shape(arrays: Iterable[np.ndarray], most: int) -> Iterator[list[np.ndarray]]:
    """Yields lists of consecutive arrays of the same shape. Each list has at most ``most`` arrays."""
    batch: list[np.ndarray] = []
    for array in arrays:
        if batch and (len(batch) == most or batch[0].shape != array.shape):
            yield batch
            batch = []
        batch.append(array)
    if batch:
        yield batch


def _fitting(feeds: Mapping[str, np.ndarray], metadata: Any) -> dict[str, np.ndarray]:
    """Returns the arrays that are inputs of the model, cast to the model's dtypes. Raises ``BadData`` if an array can't
    be cast."""
    found = {}
    for tensor in metadata.inputs:
        if tensor.name not in feeds:
            continue  # the server refuses a request that lacks a required input
        value, wanted = feeds[tensor.name], DATATYPES[tensor.datatype].numpy
        if wanted.kind == "O":
            value = to_bytes(value)
        elif value.dtype != wanted:
            kinds = {value.dtype.kind, wanted.kind}
            cast = value.astype(wanted) if value.dtype.kind in "iufbV" else None
            # Whole numbers in a JSON file or a list become int64, even if the model takes floats. Arrays of uint8 may
            # be unscaled pixels, so uint8 is not cast to floats.
            whole = value.dtype == np.int64 and wanted.kind == "f"
            same = len(kinds) == 1 or kinds <= {"i", "u", "b"} or wanted.name == "bfloat16"
            if cast is None or not (same or whole):
                raise BadData(
                    f"input '{tensor.name}' has dtype {value.dtype}, but the model takes {tensor.datatype}; save the "
                    f"array as {tensor.datatype}"
                )
            if value.dtype.kind in "iub" and not np.array_equal(cast.astype(value.dtype), value):
                raise BadData(
                    f"input '{tensor.name}' holds numbers that {tensor.datatype} can't represent; correct the numbers"
                )
            value = cast
        found[tensor.name] = value
    if not found:
        names = ", ".join(tensor.name for tensor in metadata.inputs)
        raise BadData(f"the model takes the inputs {names}, but the data has {', '.join(feeds) or 'no arrays'}")
    return found


def not_finite(feeds: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a warning for each array that holds NaN or infinity.

    Arrays with NaN are still sent, because some models take NaN for a missing value.
    """
    found = []
    for name, value in feeds.items():
        if value.dtype.kind != "f":
            continue
        rows = np.argwhere(~np.isfinite(value))
        if len(rows):
            at = f", the first at {rows[0].tolist()}" if value.ndim else ""
            found.append(f"input '{name}' holds {len(rows)} NaN or infinite values of {value.size}{at}")
    return found


def _pem(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"can't read the file {path}: {error.strerror}; check {option}") from None


def read_inputs(path: Path) -> dict[str, np.ndarray]:
    """Reads arrays by name from ``.npz``, or from ``.json`` (an object of nested lists). Unpickles nothing."""
    return dict(_arrays(path))


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import json
    import zipfile

    try:
        if path.suffix == ".json":
            body = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(body, dict):
                raise BadData(f"the file {path} has to be a JSON object with one list for each input")
            for name, values in body.items():
                yield name, np.asarray(values)
            return
        # The ``with`` statement closes the file, because numpy leaves an unreadable file open.
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadData(f"the file {path} is a single array; save one array for each input with numpy.savez")
            with archive:
                for name in archive.files:
                    yield name, archive[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadData(f"can't read the file {path} ({one_line(error, 120)}); give a .npz or .json file") from None
