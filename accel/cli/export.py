"""``accel export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.errors import BadInputSpec
from accel.sources.notes import source_notes, training_note
from accel.tables.kinds import export_formats

from . import output_options
from .options import read_normalize, source_options

if TYPE_CHECKING:
    from accel.converters.graph.preprocess import PreprocessConfig
    from accel.sources.source import SourceOptions

    from . import Output


@click.command("export")
@click.argument("model", metavar="SOURCE")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="The .onnx file, or with --to the folder."
)
@click.option("--to", default="onnx", show_default=True, help=f"{', '.join(export_formats())}.")
@source_options
@click.option(
    "--adapters-as",
    default="merged",
    show_default=True,
    metavar="merged|inputs",
    help="Merge the adapter, or keep the matrices of one or more --adapters as inputs of a decoder, chosen for each "
    "request.",
)
@click.option(
    "--channels",
    type=click.Choice(["auto", "first", "last"]),
    default="auto",
    show_default=True,
    help="Position of the channels inside the graph of a TensorFlow model. --layout is for the images.",
)
@click.option("--opset", type=int, help="The opset of the file. Default: 20, or the own opset of an ONNX file.")
@click.option("--limit", type=float, help="Largest relative error of an output (float32: 1e-4).")
@click.option(
    "--normalize", metavar="MEAN,STD", help="Normalize pixels in 0..1; one number or one a channel: .5:.4:.3,.2."
)
@click.option("--layout", type=click.Choice(["NHWC", "NCHW"]), help="Layout of the images.")
@click.option("--dtype", type=click.Choice(["uint8", "float32", "float16"]), help="Dtype of the images.")
@click.option("--resize", metavar="HxW", help="Scale images of any size to this size.")
@click.option("--postprocess", metavar="softmax|argmax|topk:K", help="Postprocess the only output.")
@click.option("--no-simplify", is_flag=True, help="Keep the exporter's graph.")
@click.option("--no-cache", is_flag=True, help="Run every stage again.")
@output_options
def command(
    model: str,
    source: SourceOptions,
    normalize: str | None,
    layout: str | None,
    dtype: str | None,
    resize: str | None,
    postprocess: str | None,
    no_simplify: bool,
    no_cache: bool,
    say: Output,
    **options: Any,
) -> None:
    """Export SOURCE to ONNX and prove that the ONNX model computes the same outputs.

    SOURCE is package.module:factory, file.py:factory, an exported program (.pt2), a TorchScript file, a folder written
    by transformers' save_pretrained, or a model of the Hugging Face Hub (org/name, org/name@revision). A TensorFlow
    SOURCE is a SavedModel folder, a Keras file (.keras, .h5,
    .hdf5), a TFLite file, or a frozen graph (.pb) or TF1 checkpoint (.meta) with --inputs and --outputs.
    """
    from accel.api.export import export
    from accel.decoders.tokenizer_ir import missing_ir
    from accel.signature.decoder import is_stateful

    artifact = export(
        model,
        preprocess=_preprocess(normalize, layout, dtype, resize, postprocess),
        simplify=not no_simplify,
        use_cache=not no_cache,
        **source,
        **options,
    )
    for note in source_notes(artifact):
        click.echo(f"accel: note: {note}", err=True)
    if is_stateful(artifact.signature) and (why := missing_ir(artifact.path.parent)):
        click.echo(f"accel: note: {why}", err=True)
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
        lines += [f"  adapters  {', '.join(artifact.adapters)}"] if artifact.adapters else []
        lines += [f"  dim  {name} {r}" for name, r in artifact.signature.dims.items()]
        lines += [f"  gate {g['stage']}: {g['summary']}" for g in artifact.proof()]
        return "\n".join(lines)

    say.result(body, human)


def _preprocess(
    normalize: str | None, layout: str | None, dtype: str | None, resize: str | None, postprocess: str | None
) -> PreprocessConfig | None:
    if not (normalize or layout or dtype or resize or postprocess):
        return None
    from accel.converters.graph.preprocess import PreprocessConfig, parse_postprocess

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
