"""``accel export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.cli import output_options
from accel.cli.options import read_dims, read_normalize, source_options, tensorflow_options
from accel.errors import BadInputSpec
from accel.sources import renaming_note, training_note

if TYPE_CHECKING:
    from accel.cli import Output
    from accel.converters.preprocess import PreprocessConfig


@click.command("export")
@click.argument("source")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="The .onnx file, or with --to the folder."
)
@click.option("--to", default="onnx", show_default=True, help="onnx, saved_model, tflite, ncnn, openvino, torch.")
@source_options
@tensorflow_options
@click.option(
    "--channels",
    type=click.Choice(["auto", "first", "last"]),
    default="auto",
    show_default=True,
    help="Where TensorFlow's convolutions have them inside the graph; how images come in is --layout.",
)
@click.option("--opset", type=int, help="The opset the file will have, exactly: 20, of an ONNX file its own.")
@click.option("--limit", type=float, help="Largest relative error of an output (float32: 1e-4).")
@click.option("--normalize", metavar="MEAN,STD", help="Of pixels in 0..1; one number or one a channel: .5:.4:.3,.2.")
@click.option("--layout", type=click.Choice(["NHWC", "NCHW"]), help="How images come in.")
@click.option("--dtype", type=click.Choice(["uint8", "float32", "float16"]), help="What images come in as.")
@click.option("--resize", metavar="HxW", help="Scale images of any size to this.")
@click.option("--postprocess", metavar="softmax|argmax|topk:K", help="What is done with the one output.")
@click.option("--no-simplify", is_flag=True, help="Leave the exporter's graph as it is.")
@click.option("--no-cache", is_flag=True, help="Run every stage again.")
@output_options
def command(
    source: str,
    out: Path,
    to: str,
    inputs: tuple[str, ...],
    weights: Path | None,
    dims: tuple[str, ...],
    tensorflow: dict[str, Any],
    channels: str,
    opset: int | None,
    limit: float | None,
    normalize: str | None,
    layout: str | None,
    dtype: str | None,
    resize: str | None,
    postprocess: str | None,
    no_simplify: bool,
    no_cache: bool,
    say: Output,
) -> None:
    """Export SOURCE to ONNX and prove that it computes the same.

    SOURCE is package.module:factory, file.py:factory, an exported program (.pt2), a TorchScript file, or a folder
    written by transformers' save_pretrained; or TensorFlow's: a SavedModel folder, a Keras file (.keras, .h5, .hdf5), a
    frozen graph (.pb) or TF1 checkpoint (.meta) with --inputs and --outputs, a TFLite file.
    """
    from accel.api.export import export

    artifact = export(
        source,
        out=out,
        to=to,
        inputs=inputs or None,
        weights=weights,
        dims=read_dims(dims),
        channels=channels,
        opset=opset,
        limit=limit,
        preprocess=_preprocess(normalize, layout, dtype, resize, postprocess),
        simplify=not no_simplify,
        use_cache=not no_cache,
        **tensorflow,
    )
    if note := renaming_note(artifact):
        click.echo(f"accel: note: {note}", err=True)
    if warning := training_note(artifact):
        click.echo(f"accel: warning: {warning}", err=True)
    body = {
        "path": str(artifact.path),
        "signature": artifact.signature.to_json(),
        "properties": dict(artifact.properties),
        "stages": [{"name": s["name"], "seconds": s["seconds"], "notes": s["notes"]} for s in artifact.history],
        "gates": artifact.proof(),
    }

    def human() -> str:
        rung = next((s["notes"]["rung"] for s in artifact.history if "rung" in s["notes"]), "")
        what = f"opset {artifact.properties['opset']}" if artifact.kind == "onnx" else artifact.kind
        lines = [
            f"{artifact.path}: {what}, {sum(f.stat().st_size for f in artifact.files) / 1e6:.1f} MB"
            + (f", exporter {rung}" if rung else "")
        ]
        lines += [f"  in   {spec}" for spec in artifact.signature.inputs]
        lines += [f"  out  {spec}" for spec in artifact.signature.outputs]
        lines += [f"  dim  {name} {r}" for name, r in artifact.signature.dims.items()]
        lines += [f"  gate {g['stage']}: {g['summary']}" for g in artifact.proof()]
        return "\n".join(lines)

    say.result(body, human)


def _preprocess(
    normalize: str | None, layout: str | None, dtype: str | None, resize: str | None, postprocess: str | None
) -> PreprocessConfig | None:
    if not (normalize or layout or dtype or resize or postprocess):
        return None
    from accel.converters.preprocess import PreprocessConfig, parse_postprocess

    mean, std = read_normalize(normalize) if normalize else ((), ())
    size = None
    if resize:
        height, cross, width = resize.partition("x")
        if not cross or not height.isdigit() or not width.isdigit() or not int(height) * int(width):
            raise BadInputSpec(f"can't read --resize {resize!r}; write HEIGHTxWIDTH, e.g. 224x224")
        size = (int(height), int(width))
    if postprocess:
        parse_postprocess(postprocess)
    return PreprocessConfig(
        mean=mean, std=std, layout=layout or "", dtype=dtype or "", resize=size, postprocess=postprocess or ""
    )
