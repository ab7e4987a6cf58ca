"""Implements ``accel infer``, which sends arrays or images to a served model and shows the outputs, or runs a model on
a dataset."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from accel.errors import MissingExtra, UsageError

from . import output_options
from .options import read_normalize, read_pairs

if TYPE_CHECKING:
    from rich.table import Table

    from accel.api.dataset.infer import DatasetReport
    from accel.serve.client.grpc import Inference

    from . import Output


def connection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the connection options. ``function`` gets the connection options as keyword arguments for
    ``InferenceClient``."""
    pem = click.Path(path_type=Path)
    for option in (
        click.option("--tls-key", "key", type=pem, help="PEM file with the key of that certificate."),
        click.option("--tls-certificate", "certificate", type=pem, help="PEM file of the client, if the server asks."),
        click.option("--tls-ca", "ca", type=pem, help="PEM file of the server certificate's CA; turns TLS on."),
        click.option("--token", envvar="ACCEL_TOKEN", help="Bearer token; better in the environment as ACCEL_TOKEN."),
        click.option(
            "--timeout", type=click.FloatRange(0.001), default=60.0, show_default=True, help="Seconds per request."
        ),
        click.option("--url", default="127.0.0.1:8001", show_default=True, help="The server's gRPC address."),
    ):
        function = option(function)
    return function


def dataset_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--dataset`` and its options to the command ``function``. With ``--dataset``, the command runs the model on
    the dataset and doesn't call ``function``."""

    @click.option(
        "--dataset",
        type=click.Path(path_type=Path),
        help="Parquet file, or a folder of them: runs MODEL, which is then a file or a folder, on each row.",
    )
    @click.option("--column", "columns", multiple=True, metavar="INPUT=COLUMN", help="The column of an input; repeat.")
    @click.option(
        "--keep",
        multiple=True,
        metavar="COLUMN",
        help="A column of the dataset for the results; repeat. By default all columns that aren't inputs.",
    )
    @click.option(
        "--pad",
        multiple=True,
        metavar="INPUT=NUMBER",
        help="Fill the end of short rows of this input, and cut the outputs again; repeat.",
    )
    @wraps(function)
    def command(
        model: str,
        *,
        dataset: Path | None,
        columns: tuple[str, ...],
        keep: tuple[str, ...],
        pad: tuple[str, ...],
        output: Path | None,
        batch: int,
        say: Output,
        **served: Any,
    ) -> Any:
        offline = {"columns", "keep", "pad"}
        if bool(served["inputs"]) == (dataset is not None):
            raise UsageError("give either --input for a model on a server or --dataset for a model on this machine")
        _check_unused(
            set(served) if dataset is not None else offline, "--input" if dataset is not None else "--dataset"
        )
        if dataset is None:
            return function(model=model, output=output, batch=batch, say=say, **served)
        if output is None:
            raise UsageError("--dataset needs a folder for the results; pass -o")
        from accel.api.dataset.infer import infer

        report = infer(
            model,
            dataset,
            out=output,
            columns=read_pairs("--column", columns, str, "x=pixels"),
            keep=keep or None,
            pad=read_pairs("--pad", pad, float, "input_ids=0"),
            batch=batch or None,
        )
        say.result(report.to_json(), lambda: _report(report))
        return None

    return command


def _check_unused(names: set[str], needs: str) -> None:
    """Raises ``UsageError`` if one of the parameters ``names`` is given, because they belong to the option
    ``needs``."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if parameter.name in names and given:
            raise UsageError(f"{parameter.opts[0]} is for {needs}; leave it out")


@click.command("infer")
@click.argument("model")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    type=click.Path(path_type=Path),
    help=".npz with one array per input, .json with one list per input, or images: .png and .jpeg files or a folder of "
    "them; repeat for more images.",
)
@click.option(
    "--normalize",
    metavar="MEAN,STD",
    help="Mean and deviation of images with pixels in 0..1: 0.485:0.456:0.406,0.229:0.224:0.225, one number or one per "
    "channel.",
)
@click.option(
    "--classes",
    type=click.IntRange(0),
    help="Show this many classes per sample; 0: outputs. For images 3 by default.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help=".npz to write the outputs to; with --dataset a folder."
)
@click.option("--model-version", default="", help="By default the newest.")
@click.option(
    "--batch",
    type=click.IntRange(0),
    default=0,
    help="Samples per request; 0: the most the model takes. With --dataset 0: the most that was verified, up to 32.",
)
@connection_options
@output_options
@dataset_options
def command(
    model: str,
    inputs: tuple[Path, ...],
    normalize: str | None,
    classes: int | None,
    output: Path | None,
    model_version: str,
    batch: int,
    say: Output,
    **connection: Any,
) -> None:
    """Send arrays or images to MODEL on a server and show the outputs, or run MODEL on a dataset."""
    try:
        from accel.serve.client.grpc import InferenceClient, not_finite, read_inputs
        from accel.serve.client.images import image_files
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from None

    files = image_files(inputs)
    if not files and (len(inputs) > 1 or normalize):
        for_arrays = "leave it out for arrays" if normalize else "give arrays in one .npz or .json file"
        raise UsageError(f"{'--normalize is' if normalize else 'several --input are'} for images; {for_arrays}")
    mean, std = read_normalize(normalize) if normalize else ((), ())
    with InferenceClient(**connection) as client:
        if files:
            found = client.infer_images(
                model, files, version=model_version, batch=batch, mean=mean, std=std, classes=classes
            )
        else:
            feeds = read_inputs(inputs[0])
            for sentence in not_finite(feeds):
                click.echo(f"accel: warning: {sentence}; sent as they are", err=True)
            found = client.infer_many(model, feeds, version=model_version, batch=batch, classes=classes or 0)
    if output is not None:
        import numpy as np

        from accel.artifact import beside

        with beside(output) as temporary, temporary.open("wb") as stream:
            arrays: Any = {k: v.astype(bytes) if v.dtype == object else v for k, v in found.outputs.items()}
            np.savez(stream, **arrays)

    names = [str(file) for file in files]
    title = f"{found.model} version {found.version}, {found.requests} request{'s' if found.requests > 1 else ''}"
    say.result(
        {**found.to_json(), **({"images": names} if names else {})},
        lambda: _classes(title, found, names) if found.classified else _outputs(title, found),
    )


def _report(report: DatasetReport) -> str:
    new = report.rows - report.earlier
    said = f"{new} rows in {report.seconds:.3g} s ({report.rows_a_second:.3g} rows/s), in {report.out}"
    if report.earlier:
        said += f"\n{report.earlier} rows were finished before"
    if report.failed:
        said += f"\n{report.failed} rows failed; {report.failed_in} has these rows and the reasons"
    return said


def _outputs(title: str, found: Inference) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("output", "datatype", "shape", "first values"):
        table.add_column(column)
    for name, value in found.outputs.items():
        shape = str(list(value.shape))
        first = ", ".join(f"{v:.6g}" if value.dtype.kind == "f" else str(v) for v in value.ravel()[:6])
        table.add_row(name, found.datatypes[name], shape, first)
    return table


def _classes(title: str, found: Inference, names: list[str]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("image" if names else "sample", "output", "class", "label", "score"):
        table.add_column(column, justify="right" if column in ("class", "score") else "left")
    for output, samples in found.classes().items():
        for row, classes in enumerate(samples):
            sample = Path(names[row]).name if names else str(row)
            for place, one in enumerate(classes):
                texts = (sample if place == 0 else "", output, str(one.index), one.label, f"{one.score:.6g}")
                table.add_row(*map(escape, texts))
    return table
