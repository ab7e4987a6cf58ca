"""``accel export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel.cli import output_options
from accel.cli.options import read_dims, source_options

if TYPE_CHECKING:
    from accel.cli import Output


@click.command("export")
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The .onnx file to write.")
@source_options
@click.option("--opset", type=int, default=20, show_default=True, help="The opset the file will have, exactly.")
@click.option("--no-simplify", is_flag=True, help="Leave the exporter's graph as it is.")
@click.option("--no-cache", is_flag=True, help="Run every stage again.")
@output_options
def command(
    source: str,
    out: Path,
    inputs: tuple[str, ...],
    weights: Path | None,
    dims: tuple[str, ...],
    opset: int,
    no_simplify: bool,
    no_cache: bool,
    say: Output,
) -> None:
    """Export SOURCE to ONNX and prove that it computes the same.

    SOURCE is package.module:factory, file.py:factory, an exported program (.pt2), a TorchScript file, or a folder
    written by transformers' save_pretrained.
    """
    from accel.api.export import export

    artifact = export(
        source,
        out=out,
        inputs=inputs or None,
        weights=weights,
        dims=read_dims(dims),
        opset=opset,
        simplify=not no_simplify,
        use_cache=not no_cache,
    )
    body = {
        "path": str(artifact.path),
        "signature": artifact.signature.to_json(),
        "properties": dict(artifact.properties),
        "stages": [{"name": s["name"], "seconds": s["seconds"], "notes": s["notes"]} for s in artifact.history],
        "gates": artifact.proof(),
    }

    def human() -> str:
        rung = next((s["notes"]["rung"] for s in artifact.history if "rung" in s["notes"]), "")
        lines = [
            f"{artifact.path}: opset {artifact.properties['opset']}, {artifact.path.stat().st_size / 1e6:.1f} MB"
            + (f", exporter {rung}" if rung else "")
        ]
        lines += [f"  in   {spec}" for spec in artifact.signature.inputs]
        lines += [f"  out  {spec}" for spec in artifact.signature.outputs]
        lines += [f"  dim  {name} {r.min}:{r.opt}:{r.max}" for name, r in artifact.signature.dims.items()]
        lines += [f"  gate {g['stage']}: {g['summary']}" for g in artifact.proof()]
        return "\n".join(lines)

    say.result(body, human)
