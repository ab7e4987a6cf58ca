"""``accel infer``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.cli import output_options
from accel.errors import MissingExtra

if TYPE_CHECKING:
    from accel.cli import Output


@click.command("infer")
@click.argument("model")
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="The server's gRPC address.")
@click.option(
    "--input",
    "inputs",
    required=True,
    type=click.Path(path_type=Path),
    help=".npz with one array an input, or .json with one list an input.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help=".npz to write the outputs to.")
@click.option("--model-version", default="", help="By default the newest.")
@click.option("--batch", type=click.IntRange(0), default=0, help="Samples a request; 0: the most the model takes.")
@click.option("--timeout", type=click.FloatRange(0.001), default=60.0, show_default=True, help="Seconds a request.")
@click.option("--token", envvar="ACCEL_TOKEN", help="Bearer token; better in the environment as ACCEL_TOKEN.")
@click.option(
    "--tls-ca", type=click.Path(path_type=Path), help="PEM of who signed the server's certificate; turns TLS on."
)
@output_options
def command(
    model: str,
    url: str,
    inputs: Path,
    output: Path | None,
    model_version: str,
    batch: int,
    timeout: float,
    token: str | None,
    tls_ca: Path | None,
    say: Output,
) -> None:
    """Send arrays to MODEL on a server and show what comes back."""
    try:
        from accel.serve.client import InferenceClient, read_inputs
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from None

    feeds = read_inputs(inputs)
    with InferenceClient(url, token=token, ca=tls_ca, timeout=timeout) as client:
        found = client.infer_many(model, feeds, version=model_version, batch=batch)
    if output is not None:
        import numpy as np

        from accel.artifact import beside

        with beside(output) as temporary, temporary.open("wb") as stream:
            arrays: Any = {k: v.astype(bytes) if v.dtype == object else v for k, v in found.outputs.items()}
            np.savez(stream, **arrays)

    def human() -> Any:
        from rich.table import Table

        title = f"{found.model} version {found.version}, {found.requests} request{'s' if found.requests > 1 else ''}"
        table = Table(title=title, title_justify="left")
        for column in ("output", "datatype", "shape", "first values"):
            table.add_column(column)
        for name, value in found.outputs.items():
            shape = str(list(value.shape))
            first = ", ".join(f"{v:.6g}" if value.dtype.kind == "f" else str(v) for v in value.ravel()[:6])
            table.add_row(name, found.datatypes[name], shape, first)
        return table

    say.result(found.to_json(), human)
