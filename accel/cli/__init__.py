"""Implements the command line, with a file for each click command. ``__init__.py`` loads a command's module when the
command runs, shows progress and prints errors.

A command reads the command-line arguments, prints text (or one JSON object with ``--json``) on stdout, and ends with an
exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import click

from accel.cancel import on_interrupt
from accel.errors import AccelError, one_line
from accel.folders.writing import cannot_write
from accel.machine import collect_rarely, share_cores
from accel.progress import PlainLines, silent, watched_by
from accel.spelling import on_command_line
from accel.version import __version__

# Maps a command's name to its module and its line of help. A module is imported when its command runs, which keeps
# `accel --help` fast.
COMMANDS = {
    "export": ("accel.cli.export", "Export a PyTorch or TensorFlow model to ONNX, or ONNX to another format."),
    "optimize": ("accel.cli.optimize", "Make the fastest correct form of a model for a target."),
    "bench": ("accel.cli.bench", "Time artifacts and sources beside one another."),
    "verify": ("accel.cli.verify", "Compare the outputs of two models."),
    "preflight": (
        "accel.cli.preflight",
        "List the nodes of an ONNX model that an engine build refuses, and rewrite them.",
    ),
    "bisect": ("accel.cli.bisect", "Find the first node at which two ONNX models differ."),
    "inspect": ("accel.cli.inspect", "Show what a model is and how it was made."),
    "reproduce": ("accel.cli.reproduce", "Make an artifact again from its source and compare, stage by stage."),
    "generate": ("accel.cli.generate", "Generate text with a decoder."),
    "serve": ("accel.cli.serve", "Serve a repository of models over gRPC and HTTP, as Triton does."),
    "infer": ("accel.cli.infer", "Ask a served model (arrays in, table or JSON out), or run a model on a dataset."),
    "kernels": ("accel.cli.kernels", "Fused kernels: list them, build them, check them on this machine."),
    "train": ("accel.cli.train", "Train a model on one process or many, to a checkpoint that exports."),
    "plan": ("accel.cli.plan", "Show memory, communication and time of a training run or a deployment."),
    "doctor": ("accel.cli.doctor", "Show what is installed, what is missing and what each missing part would bring."),
}


class LazyGroup(click.Group):
    """Lists the commands without importing the modules of the commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        return module.command  # type: ignore[no-any-return]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


# click suggests similar names ("Did you mean") from this list.
@click.group(cls=LazyGroup, commands=dict.fromkeys(COMMANDS), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="accel")
def group() -> None:
    """Turn a trained model into the fastest correct form for the machine that you name, and prove the result."""
    if click.get_current_context().invoked_subcommand not in ("serve", "train"):
        share_cores()
        collect_rarely()


def main() -> None:
    """The ``accel`` command."""
    # A SIGTERM ends a run in the same way as Ctrl-C. In both cases, the run ends its child processes and removes
    # half-written files. SIGINT stays ignored if a shell started accel as a background job.
    signal.signal(signal.SIGTERM, on_interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    sys.exit(run(group))


def run(command: click.Command, arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code, which is 0 for success, 1 for a failure and 2 for wrong usage. Prints
    an error as one line on stderr, never as a traceback."""
    try:
        with on_command_line():
            command.main(args=arguments, prog_name="accel", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:  # click raises Abort from KeyboardInterrupt
        said = "interrupted; run the same command again to go on at the interrupted stage"
        return _say(str(error.__cause__ or error) or said)
    except AccelError as error:
        return _say(str(error), error.exit_code)
    except BrokenPipeError:  # the reader closed the pipe
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 1
    except OSError as error:
        return _say(str(cannot_write(error)))
    except MemoryError:
        return _say("out of memory; free some, or lower the largest batch with --dim batch=1:1:2")
    except Exception as error:
        if os.environ.get("ACCEL_DEBUG"):
            raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        return _say(f"this should not have happened ({reason}); set ACCEL_DEBUG=1 to see where, and report it")
    return 0


def _say(message: str, code: int = 1) -> int:
    click.echo(f"accel: error: {one_line(message, None)}", err=True)
    return code


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--json`` and ``--quiet`` to a command. The command's function gets an ``Output`` called ``say``."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress.")
    @wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> Any:
        say = Output(as_json=as_json, quiet=quiet)
        # The user's factory or metric may print text, which must not mix with the JSON object on stdout.
        aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
        with aside, say.progress():
            return function(*args, say=say, **kwargs)

    return wrapped


# The width of a table in characters, without --wide and with --wide.
TABLE_WIDTH, ANY_WIDTH = 100, 4000


class Output:
    """Prints the results of a command to stdout, and the progress to stderr."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._stdout = sys.stdout
        self._bar: Any = None

    def result(self, body: Any, human: Callable[[], Any], *, columns: int = 140) -> None:
        """With ``--json``, prints ``body`` as one JSON object. Without ``--json``, prints the text or the rich object
        that ``human`` returns. On a terminal, a rich object is as wide as the terminal. In a pipe, or if ``columns`` is
        ``ANY_WIDTH``, a rich object has a width of ``columns`` characters."""
        self._stop_bar()
        if self.as_json:
            click.echo(json.dumps(body, allow_nan=False), file=self._stdout)
            return
        made = human()
        if isinstance(made, str):
            click.echo(made)
        else:
            from rich.console import Console

            fits = sys.stdout.isatty() and columns != ANY_WIDTH
            Console(width=None if fits else columns).print(made)

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Shows progress as a bar on a terminal, or as plain lines in a pipe. With ``--quiet``, shows no progress."""
        if self.quiet:
            with watched_by(silent):
                yield
            return
        if not sys.stderr.isatty():
            with watched_by(PlainLines()):
                yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = self._bar.add_task("starting", total=None)

        def show(message: str, fraction: float | None) -> None:
            total, done = (None, 0.0) if fraction is None else (1.0, fraction)
            self._bar.update(task, description=message, total=total, completed=done)

        self._bar.start()
        try:
            with watched_by(show):
                yield
        finally:
            self._stop_bar()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
