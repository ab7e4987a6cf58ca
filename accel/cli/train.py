"""``accel train``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel.errors import BadConfig

from . import output_options

if TYPE_CHECKING:
    from . import Output


# Maps the name of an option to the config key that the option sets.
_KEYS = {
    "zero": "parallel.zero",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "steps": "steps",
    "precision": "precision.mode",
    "sync_batchnorm": "parallel.sync_batchnorm",
}


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--nproc", type=click.IntRange(1), default=1, show_default=True, help="Ranks on this machine.")
@click.option("--nnodes", default="1", show_default=True, help="The number of machines, or MIN:MAX.")
@click.option("--rendezvous", metavar="HOST:PORT", help="The address where the machines meet.")
@click.option("--max-restarts", type=int, default=0, show_default=True, help="How often to restart after a rank died.")
@click.option("--zero", type=int, help="ZeRO stage, 0 to 3.")
@click.option("--tp", type=int, help="Ranks that share each tensor, as [tensor_parallel] of CONFIG says.")
@click.option("--pp", type=int, help="Pipeline stages (--parallel.pipeline names the schedule).")
@click.option("--cp", type=int, help="Ranks that share each sequence (--parallel.cp_method names the method).")
@click.option("--steps", type=int, help="Optimizer steps.")
@click.option("--precision", help="fp32, autocast-bf16, autocast-fp16, bf16, fp16, ... or O0 to O3.")
@click.option("--resume-as", metavar="MODE", help="Go on in this precision from a checkpoint of another precision.")
@click.option("--sync-batchnorm", is_flag=True, default=None, help="Batch norm over the samples of all ranks.")
@click.option("--fresh", is_flag=True, help="Start over even if the folder holds checkpoints.")
@click.option("--dry-run", is_flag=True, help="Print the plan of the run (memory, traffic, time), and launch nothing.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The folder of the run.")
@output_options
def command(
    config: Path,
    overrides: tuple[str, ...],
    nproc: int,
    nnodes: str,
    rendezvous: str | None,
    max_restarts: int,
    fresh: bool,
    dry_run: bool,
    out: Path,
    say: Output,
    **given: int | str | bool | None,
) -> None:
    """Train the model that the TOML file CONFIG describes. Checkpoints are written to the folder --out, and a new run
    continues from the newest checkpoint.

    --key=value or --table.key=value overrides a key of the config, e.g. --optimizer.lr=0.01. The trained model is in
    OUT/final. The command accel export OUT reads the trained model.
    """
    from accel.train.config.schema import TrainConfig
    from accel.train.run.launch import find_config, train

    resume_as = given.pop("resume_as")
    if resume_as is not None:
        if given["precision"] not in (None, resume_as):
            raise BadConfig(f"--resume-as {resume_as} sets the precision; leave out --precision {given['precision']}")
        given["precision"] = resume_as
    words = [f"{_KEYS[n]}={'true' if value is True else value}" for n, value in given.items() if value is not None]
    words += ["checkpoint.convert=true"] if resume_as is not None else []
    for index, text in enumerate(overrides):
        if not text.startswith("--") or "=" not in text:
            value = next(iter(overrides[index + 1 : index + 2]), "--")
            whole = text.startswith("--") and not value.startswith("--")
            fix = f"{text}={value}" if whole else "--key=value, e.g. --optimizer.lr=0.01"
            raise BadConfig(f"can't read the option {text!r}; write {fix}")
        words.append(text.removeprefix("--"))
    loaded = TrainConfig.load(find_config(config), words)
    if dry_run:
        from accel.api.plan import layout_of_config, plan, spec_of_config
        from accel.plan.spec import Machine

        from .plan import assumptions
        from .plan import words as lines

        machine = Machine()
        planned = plan(spec_of_config(loaded), layout_of_config(loaded, nproc), machine)
        body = planned.to_json() | {"assumptions": assumptions(machine, planned)}
        done = "nothing was started; leave out --dry-run to train, or give accel plan the figures of your machine"
        say.result(body, lambda: f"{lines(planned, machine)}\n{done}")
        return
    result = train(
        loaded, out, nproc=nproc, nnodes=nnodes, max_restarts=max_restarts, rendezvous=rendezvous, fresh=fresh
    )

    from accel.train.checkpoints.final import export_best_words, export_words

    def human() -> str:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
        skips = f", {result['skipped']} of them skipped because float16 overflowed" if result.get("skipped") else ""
        last = result.get("loss")
        loss = (
            " (all steps were done before)"
            if "loss" not in result
            else f", loss {'nan' if last is None else f'{last:.4f}'}"
        )
        return (
            f"{out / 'final'}: {result['steps']} steps{loss}{skips}{'; evaluate: ' + metrics if metrics else ''}"
            f"\nnow: {shlex.join(export_words(out))}{better()}"
        )

    def better() -> str:
        best = result.get("best")
        if best is None:
            return ""
        name, checkpoint = best["metric"].removeprefix("-"), out / "checkpoints" / f"step-{best['step']:08d}"
        words = export_best_words(out, loaded.model, checkpoint)
        return (
            f"\nthese are the last weights; the best weights (step {best['step']}, {name} {best['metrics'][name]:.4f}) "
            f"are in {out / 'checkpoints'}: {shlex.join(words)}"
        )

    say.result({**result, "final": str(out / "final")}, human)
