"""Tells the user of ``accel serve`` how to send a first request: a line for curl, and three lines of Python.

The lines are complete. Pasted into a shell and into Python, they get an answer of the model. The inputs are zeros, or
the valid numbers next to zero. A model that answers with a stream is asked in Python alone.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.signature import TensorSpec

from ..models.model import ServedModel
from ..protocol.tensors import DATATYPES
from ..transports.http.wire import BINARY_ONLY, HEADER_LENGTH
from .options import ServeOptions

# A request of at most this many numbers is sent as JSON, which people can read and change.
_READABLE = 32


def first_request(options: ServeOptions, ports: Mapping[str, int], models: list[ServedModel]) -> str:
    """Returns the text that tells how to ask the first of ``models`` that gives a single answer, or else the first that
    gives a stream.

    Returns "" if there is no model, or if clients need a certificate of their own.
    """
    model = next((m for m in models if not m.scheduling.decoupled), next(iter(models), None))
    if model is None or options.tls_client_ca:
        return ""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(options.host, options.host)
    host = f"[{host}]" if ":" in host else host
    where = "in a shell or in Python"
    if "http" in ports and not model.scheduling.decoupled:
        scheme = "https" if options.tls_certificate else "http"
        lines = _over_http(options, f"{scheme}://{host}:{ports['http']}/v2/models/{model.name}/infer", model)
    else:
        lines = _over_grpc(options, f"{host}:{ports['grpc']}", model)
        where = "in Python"
    others = ", ".join(dict.fromkeys(m.name for m in models if m.name != model.name))
    first = f"Ask the model {model.name}" + (f" (the server also has {others})" if others else "")
    first += ", after you have set ACCEL_TOKEN to a token" if options.tokens else ""
    return "\n".join([f"{first}, {where}:", "", *lines])


@dataclass(frozen=True, kw_only=True)
class _Input:
    """An input of the first request, whose numbers are all ``fill``."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    fill: float

    @property
    def described(self) -> dict[str, Any]:
        """Returns the input's part of the JSON, without the data."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def value(self) -> bool | float | str:
        """Returns one element of the data in JSON."""
        return "" if self.datatype == "BYTES" else False if self.datatype == "BOOL" else self.fill

    @property
    def raw(self) -> bytes:
        """Returns one element of the raw data. 4 zero bytes are an empty string."""
        return bytes(4) if self.datatype == "BYTES" else np.array(self.fill, DATATYPES[self.datatype].numpy).tobytes()

    @property
    def shell(self) -> str:
        """Returns the command that writes the raw data. A shell's printf repeats its format for every word."""
        if not any(self.raw):
            return f"head -c {len(self.raw) * self.count} /dev/zero"
        octal = "".join(f"\\{byte:03o}" for byte in self.raw)
        return f"printf '{octal}%.0s' $(seq {self.count})"

    @property
    def python(self) -> str:
        """Returns the expression for the raw data."""
        return f"{self.raw!r} * {self.count}" if any(self.raw) else f"bytes({len(self.raw) * self.count})"


def _inputs(model: ServedModel) -> list[_Input]:
    """Returns the required inputs, for one row of usual size."""
    sizes = {**model.signature.sizes(), **_one_row(model)}
    shapes = _shapes(model, sizes)
    specs = {spec.name: spec for spec in model.signature.inputs}
    for name in shapes.keys() & specs.keys():  # the config may fix the size of a dynamic dim
        if len(shapes[name]) == len(specs[name].shape):
            sizes |= {str(dim): size for dim, size in zip(specs[name].shape, shapes[name], strict=True)}
    return [
        _Input(
            name=name,
            datatype=model.inputs[name].datatype,
            shape=shape,
            fill=_fill(specs[name], sizes) if name in specs else 0,
        )
        for name, shape in shapes.items()
    ]


def _fill(spec: TensorSpec, sizes: Mapping[str, int]) -> float:
    """Returns 0, or the number next to 0 in the range of the input."""
    low, high = spec.range_at(sizes) or spec.span_at(sizes) or spec.seen or (0, 0)
    return min(max(0, low), high)


def _shapes(model: ServedModel, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each required input as clients see it."""
    usual = {spec.name: spec.resolve(sizes) for spec in model.signature.inputs}
    found = {}
    for name in model.inputs:
        if name not in model.required:
            continue
        said = model.inputs[name].shape
        real = usual.get(name, ())
        real = real if len(real) == len(said) else (1,) * len(said)
        found[name] = tuple(dim if dim >= 0 else size for dim, size in zip(said, real, strict=True))
    return found


def _one_row(model: ServedModel) -> dict[str, int]:
    batch = model.signature.batch_dim
    return {batch: model.signature.dims[batch].min} if batch and model.scheduling.max_batch_size else {}


def _over_http(options: ServeOptions, url: str, model: ServedModel) -> list[str]:
    inputs = _inputs(model)
    rows = [one.described for one in inputs]
    body: dict[str, Any] = {"inputs": rows}
    parameters: dict[str, Any] = {}
    if any(tensor.datatype in BINARY_ONLY for tensor in model.outputs.values()):
        parameters["binary_data_output"] = True
    if model.scheduling.sequence is not None:
        parameters |= {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    if parameters:
        body["parameters"] = parameters
    headers = {}
    tail = ""
    shell = "curl -s"
    if any(one.datatype in BINARY_ONLY for one in inputs) or sum(one.count for one in inputs) > _READABLE:
        for row, one in zip(rows, inputs, strict=True):
            row["parameters"] = {"binary_data_size": len(one.raw) * one.count}
        head = json.dumps(body)
        headers[HEADER_LENGTH] = str(len(head.encode()))
        tail = "".join(f" + {one.python}" for one in inputs)
        parts = "; ".join([f"printf %s {shlex.quote(head)}", *(one.shell for one in inputs)])
        shell = f"({parts}) | curl -s --data-binary @-"
        data = ""
    else:
        for row, one in zip(rows, inputs, strict=True):
            row["data"] = [one.value] * one.count
        data = f" -d {shlex.quote(json.dumps(body))}"
    modules, context = "json, urllib.request", ""
    if options.tls_certificate:
        shell += f" --cacert {shlex.quote(options.tls_certificate)}"
        modules = "json, ssl, urllib.request"
        context = f", context=ssl.create_default_context(cafile={options.tls_certificate!r})"
    said = [f"-H {shlex.quote(f'{key}: {value}')}" for key, value in headers.items()]
    written = repr(headers)
    if options.tokens:
        said.append('-H "Authorization: Bearer $ACCEL_TOKEN"')
        written = f'{{**{headers!r}, "Authorization": "Bearer " + os.environ["ACCEL_TOKEN"]}}'
        modules = modules.replace("json,", "json, os,")
    return [
        " ".join([shell, *said, url]) + data,
        "",
        f"import {modules}",
        f"request = urllib.request.Request({url!r}, json.dumps({body!r}).encode(){tail}, {written})",
        f"print(urllib.request.urlopen(request{context}).read())",
    ]


def _over_grpc(options: ServeOptions, url: str, model: ServedModel) -> list[str]:
    arrays = []
    for one in _inputs(model):
        kind = "object" if one.datatype == "BYTES" else DATATYPES[one.datatype].numpy.name
        made = f"np.full({one.shape}, {one.fill!r}, {kind!r})" if one.fill else f"np.zeros({one.shape}, {kind!r})"
        arrays.append(f"{one.name!r}: {made}")
    extra = f", ca=Path({options.tls_certificate!r})" if options.tls_certificate else ""
    modules = "from accel.serve.client.grpc import InferenceClient"
    first = "import numpy as np"
    if options.tls_certificate:
        first = "from pathlib import Path; import numpy as np"
    if options.tokens:
        first = first.replace("import numpy", "import os; import numpy")
        extra += ', token=os.environ["ACCEL_TOKEN"]'
    words = f"({model.name!r}, {{{', '.join(arrays)}}})"
    if model.scheduling.decoupled:
        return [first, modules, f"for answer in InferenceClient({url!r}{extra}).stream{words}: print(answer)"]
    return [first, modules, f"print(InferenceClient({url!r}{extra}).infer_many{words}.outputs)"]
