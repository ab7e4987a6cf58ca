"""Tells the user of ``accel serve`` how to send a first request: a line for curl, and three lines of Python.

The lines are complete. Pasted into a shell and into Python, they get an answer of the model, whose inputs are zeros.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from ..models.model import ServedModel
from ..protocol.tensors import DATATYPES
from ..transports.http.wire import BINARY_ONLY, HEADER_LENGTH
from .options import ServeOptions

# A request of at most this many numbers is sent as JSON, which people can read and change.
_READABLE = 32


def first_request(options: ServeOptions, ports: Mapping[str, int], models: list[ServedModel]) -> str:
    """Returns the text that tells how to ask the first of ``models`` that answers a single request.

    Returns "" if no model does, or if clients need a certificate of their own.
    """
    model = next((m for m in models if not m.scheduling.decoupled), None)
    if model is None or options.tls_client_ca:
        return ""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(options.host, options.host)
    host = f"[{host}]" if ":" in host else host
    if "http" in ports:
        scheme = "https" if options.tls_certificate else "http"
        lines = _over_http(options, f"{scheme}://{host}:{ports['http']}/v2/models/{model.name}/infer", model)
    else:
        lines = _over_grpc(options, f"{host}:{ports['grpc']}", model)
    others = ", ".join(dict.fromkeys(m.name for m in models if m.name != model.name))
    first = f"Ask the model {model.name}" + (f" (the server also has {others})" if others else "")
    first += ", after you have set ACCEL_TOKEN to a token" if options.tokens else ""
    return "\n".join([f"{first}, in a shell or in Python:", "", *lines])


def _inputs(model: ServedModel) -> list[dict[str, Any]]:
    """Returns the name, the datatype and the shape of each required input, for one row of usual size."""
    usual = {spec.name: spec.resolve({**model.signature.sizes(), **_one_row(model)}) for spec in model.signature.inputs}
    found = []
    for name in model.inputs:
        if name not in model.required:
            continue
        said = model.inputs[name].shape
        sizes = usual.get(name, ())
        sizes = sizes if len(sizes) == len(said) else (1,) * len(said)
        shape = [dim if dim >= 0 else size for dim, size in zip(said, sizes, strict=True)]
        found.append({"name": name, "datatype": model.inputs[name].datatype, "shape": shape})
    return found


def _one_row(model: ServedModel) -> dict[str, int]:
    batch = model.signature.batch_dim
    return {batch: model.signature.dims[batch].min} if batch and model.scheduling.max_batch_size else {}


def _over_http(options: ServeOptions, url: str, model: ServedModel) -> list[str]:
    rows = _inputs(model)
    body: dict[str, Any] = {"inputs": rows}
    parameters: dict[str, Any] = {}
    if any(tensor.datatype in BINARY_ONLY for tensor in model.outputs.values()):
        parameters["binary_data_output"] = True
    if model.scheduling.sequence is not None:
        parameters |= {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    if parameters:
        body["parameters"] = parameters
    counts = [math.prod(row["shape"]) for row in rows]
    headers = {}
    tail = ""
    shell = "curl -s"
    if any(row["datatype"] in BINARY_ONLY for row in rows) or sum(counts) > _READABLE:
        for row, count in zip(rows, counts, strict=True):
            # 4 zero bytes are an empty string.
            size = 4 if row["datatype"] == "BYTES" else DATATYPES[row["datatype"]].numpy.itemsize
            row["parameters"] = {"binary_data_size": count * size}
        total = sum(row["parameters"]["binary_data_size"] for row in rows)
        head = json.dumps(body)
        headers[HEADER_LENGTH] = str(len(head.encode()))
        tail = f" + bytes({total})"
        shell = f"(printf %s {shlex.quote(head)}; head -c {total} /dev/zero) | curl -s --data-binary @-"
        data = ""
    else:
        for row, count in zip(rows, counts, strict=True):
            row["data"] = [{"BYTES": "", "BOOL": False}.get(row["datatype"], 0)] * count
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
    for row in _inputs(model):
        kind = "object" if row["datatype"] == "BYTES" else DATATYPES[row["datatype"]].numpy.name
        arrays.append(f"{row['name']!r}: np.zeros({tuple(row['shape'])}, {kind!r})")
    extra = f", ca=Path({options.tls_certificate!r})" if options.tls_certificate else ""
    modules = "from accel.serve.client.grpc import InferenceClient"
    first = "import numpy as np"
    if options.tls_certificate:
        first = "from pathlib import Path; import numpy as np"
    if options.tokens:
        first = first.replace("import numpy", "import os; import numpy")
        extra += ', token=os.environ["ACCEL_TOKEN"]'
    call = f"InferenceClient({url!r}{extra}).infer_many({model.name!r}, {{{', '.join(arrays)}}})"
    return [first, modules, f"print({call}.outputs)"]
