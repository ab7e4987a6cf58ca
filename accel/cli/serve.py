"""``accel serve``: runs the server, checks a repository, or prints a manifest for Kubernetes."""

from __future__ import annotations

import re
import sys
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from accel.errors import MissingExtra, UsageError

from . import output_options

if TYPE_CHECKING:
    from . import Output

_FILE = click.Path(path_type=Path)


# Maps each option of Triton's server to advice for its users.
_TRITON = {
    **dict.fromkeys(("--model-repository", "--model-store"), "write the folder itself: accel serve FOLDER"),
    "--model-control-mode": "write --mode none, poll or explicit",
    "--repository-poll-secs": "write --poll-seconds",
    "--exit-timeout-secs": "write --drain",
    "--exit-on-error": "leave it out: a broken model leaves the others serving, and --check says what is wrong",
    **dict.fromkeys(("--http-address", "--grpc-address"), "write --host"),
    **dict.fromkeys(("--allow-http", "--allow-grpc"), "leave it out: gRPC is always on, and HTTP without --no-http"),
    **dict.fromkeys(("--allow-metrics", "--metrics-port"), "leave it out: /metrics is on the --http-port"),
    **dict.fromkeys(("--cache-config", "--response-cache-byte-size"), "write --response-cache-bytes"),
    **dict.fromkeys(("--trace-config", "--trace-file", "--trace-level"), "write --trace URL and --trace-rate"),
    "--rate-limit": "leave it out: write rate_limiter into a model's config, and --rate-limit-resource",
    **dict.fromkeys(("--backend-config", "--backend-directory"), "write parameters into config.pbtxt, or --threads"),
    **dict.fromkeys(
        ("--strict-model-config", "--disable-auto-complete-config"), "leave it out: config.pbtxt is optional"
    ),
    **dict.fromkeys(
        ("--log-verbose", "--log-info", "--log-format"),
        "leave it out, or write --log-file",
    ),
    **dict.fromkeys(("--grpc-use-ssl", "--grpc-server-cert"), "write --tls-certificate and --tls-key"),
    "--grpc-server-key": "write --tls-key",
    "--grpc-root-cert": "write --tls-client-ca",
}


class _Serve(click.Command):
    """Rejects each option of Triton's server with advice, such as the equivalent accel option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _TRITON:
                raise
            raise UsageError(
                f"{error.option_name} is an option of Triton's server; {_TRITON[error.option_name]}"
            ) from None


@click.command("serve", cls=_Serve)
@click.argument("what", nargs=-1, required=True, metavar="REPOSITORY | [NAME=]MODEL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0: a free port.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free port.")
@click.option("--no-http", is_flag=True, help="Serve neither REST nor metrics.")
@click.option(
    "--mode",
    type=click.Choice(["none", "poll", "explicit"]),
    default="none",
    show_default=True,
    help="none: load every model once; poll: also look for changes; explicit: load on command.",
)
@click.option(
    "--load-model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model to load at the start in explicit mode; * loads all.",
)
@click.option("--poll-seconds", type=click.FloatRange(0.05), default=15.0, show_default=True)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="The number of processes that share the ports.",
)
@click.option("--restart", is_flag=True, help="Restart a process that crashes; --processes 2 or more always does.")
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads of a session; 0: its share of the cores.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "native", "cygrpc", "grpc"]),
    default="auto",
    show_default=True,
    help="How gRPC calls are answered. native: by libnghttp2, through an extension that is compiled at its first use; "
    "cygrpc: by the core of grpcio, in batches; grpc: by grpcio's server; auto: native where it was compiled before, "
    "else cygrpc, if accel knows the installed version of grpcio.",
)
@click.option(
    "--max-resets-per-second",
    "max_resets",
    type=click.FloatRange(0),
    default=1000.0,
    show_default=True,
    help="For --transport native: a connection ends if its client resets more calls; 0: no limit. An address may reset "
    "ten times as many.",
)
@click.option(
    "--max-connections-per-address",
    "max_connections",
    type=click.IntRange(0),
    default=None,
    help="For --transport native: the open gRPC connections of an address, or of an IPv6 /64, in each process; 0: no "
    "limit. Default: 4096, or half of the files that the process may open if that is less.",
)
@click.option(
    "--grpc-threads",
    type=click.IntRange(4),
    default=512,
    show_default=True,
    help="Calls that can wait at the same time.",
)
@click.option(
    "--max-message",
    type=click.IntRange(0),
    default=0,
    help="The largest message in bytes; 0: 256 MiB, or more if an input of a model can be larger.",
)
@click.option(
    "--drain",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds that requests have to end after SIGTERM.",
)
@click.option(
    "--drain-delay",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Seconds after SIGTERM in which the server takes requests, but tells load balancers that it isn't ready.",
)
@click.option("--tokens", type=_FILE, help="TOML file of bearer tokens, and of the models that each token is for.")
@click.option("--tls-certificate", type=_FILE, help="PEM.")
@click.option("--tls-key", type=_FILE, help="PEM.")
@click.option("--tls-client-ca", type=_FILE, help="PEM; clients have to show a certificate signed by this CA.")
@click.option("--insecure", is_flag=True, help="Serve a model even if it doesn't match its manifest.")
@click.option("--allow-pickle", is_flag=True, help="Serve .pt2 and .pt files, which may hold pickles.")
@click.option(
    "--allow-python-backend",
    is_flag=True,
    help="Run models that are Python code (model.py with TritonPythonModel), each instance in a process of its own.",
)
@click.option(
    "--allow-model-upload",
    is_flag=True,
    help="Let clients send a model's files with the command to load it (file: parameters), in explicit mode.",
)
@click.option("--server-name", default="accel", show_default=True, help="The name that clients are told: triton.")
@click.option(
    "--extension",
    "extensions",
    multiple=True,
    metavar="NAME",
    help="An extension of the protocol that clients are told, in place of those that the server has. Repeatable.",
)
@click.option("--strict-readiness", is_flag=True, help="Report not ready while a model of the repository is broken.")
@click.option("--trace", metavar="URL", help="OTLP/HTTP endpoint for traces: http://127.0.0.1:4318/v1/traces.")
@click.option(
    "--trace-rate",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Trace one request in this many, and every request with a traceparent; 0: only requests with a traceparent.",
)
@click.option("--log-file", type=_FILE, help="Write the log, JSON lines, to this file and not to stderr.")
@click.option(
    "--response-cache-bytes",
    type=click.IntRange(0),
    default=64 << 20,
    show_default=True,
    help="Size of the cache that all models with a response cache share in a process; 0: one cache for each model.",
)
@click.option(
    "--rate-limit-resource",
    "rate_limits",
    multiple=True,
    metavar="NAME:COUNT",
    help="The amount of a resource, in each process, for the rate_limiter of the models' configs.",
)
@click.option(
    "--host-policy",
    "host_policies",
    multiple=True,
    metavar="NAME,cpu-cores=0-3",
    help="The cores of instance groups whose config names this host_policy.",
)
@click.option(
    "--manifest",
    type=click.Choice(["kubernetes", "kserve", "kserve-runtime"]),
    help="Print a manifest that deploys a server with these options, and end. REPOSITORY and other paths are then "
    "paths inside the container.",
)
@click.option("--image", default="", help="For --manifest: the container image that has accel in it.")
@click.option("--claim", default="", help="For --manifest: the PersistentVolumeClaim to mount at REPOSITORY.")
@click.option(
    "--deploy",
    multiple=True,
    metavar="KEY=VALUE",
    help="For --manifest: cpu=2, memory=4Gi and gpus=1 of a replica, min-replicas=1, max-replicas=4, "
    "target-cpu-percent=70, target-queue-ms=50 (see the page Several machines), secret=NAME:/folder (a Secret to "
    "mount, for tokens and certificates). Repeatable.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Load every model, run its warm-up, report which models can't be served, and end.",
)
@output_options
def command(
    what: tuple[str, ...],
    no_http: bool,
    check: bool,
    http_port: int,
    manifest: str | None,
    image: str,
    claim: str,
    deploy: tuple[str, ...],
    say: Output,
    **given: Any,
) -> None:
    """Serve models over gRPC and HTTP (Triton's Open Inference Protocol).

    Each MODEL is a model file, or the folder that `accel optimize -o` wrote. Without NAME=, the file's or the folder's
    name is the model's name. REPOSITORY is a folder with one subfolder for each model, or an address that begins with
    s3://, gs:// or http(s)://. The models at an address are copied into the cache; with --mode poll, changes at the
    address are copied, too.

    Once the server is ready, it prints how to send a first request.
    """
    context = click.get_current_context()
    if given["allow_model_upload"] and given["mode"] != "explicit":
        raise UsageError("--allow-model-upload is for --mode explicit; in other modes, clients load no models")
    if given["models"] and given["mode"] != "explicit":
        raise UsageError("--load-model is for --mode explicit; the other modes load every model")
    if manifest:
        if no_http:
            raise UsageError("the health probes of a Kubernetes manifest use HTTP; leave out --no-http")
        if len(what) > 1:
            raise UsageError(f"--manifest {manifest} deploys one repository; put the models into one folder")
        ends = ceil(given["drain"] + given["drain_delay"])
        fields: dict[str, Any] = {"repository": what[0], "image": image, "claim": claim, "drain_seconds": ends}
        fields |= {"grpc_port": given["grpc_port"], "http_port": http_port, "words": _words(context)}
        _manifest(manifest, {**fields, **_deployed(deploy)}, say)
        return
    try:
        from accel.serve.models.places import read_words, why_empty
        from accel.serve.process.options import ServeOptions
        from accel.serve.process.serving import ServingProcess, end, start_logging
        from accel.serve.process.supervisor import Supervisor
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "serve") from None

    texts: dict[str, Any] = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    repository, single = read_words(what)
    named = tuple(f"{name}={path}" for name, path in single.items())
    options = ServeOptions(repository=repository, named=named, http_port=None if no_http else http_port, **texts)
    if check:
        _check(options, say)
        return
    start_logging(options)
    lacks = why_empty(repository, options.mode == "poll")
    if lacks and options.mode != "explicit":  # in explicit mode, the models come later
        click.echo(f"accel: warning: {lacks}", err=True)

    def ready(advice: str) -> None:
        if advice and not say.quiet:
            say.result({"first_request": advice}, lambda: advice)

    if options.supervised:
        Supervisor(options).run(ready)
    else:
        ServingProcess(options).run(ready)
        end()


# The options that a Kubernetes manifest doesn't pass on to the server in the container.
_OWN = (
    "what", "host", "grpc_port", "http_port", "manifest", "image", "claim", "deploy", "check", "as_json", "quiet",
)  # fmt: skip


def _words(context: click.Context) -> tuple[str, ...]:
    """Returns the given options as command-line arguments for the server in the container."""
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        if name in _OWN or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        flag = option.opts[0]
        if isinstance(value, bool):
            words.append(flag)
        else:
            words += [word for one in (value if isinstance(value, tuple) else (value,)) for word in (flag, str(one))]
    return tuple(words)


def _deployed(given: tuple[str, ...]) -> dict[str, Any]:
    """Parses ``KEY=VALUE`` texts into fields of ``Deployment``. Raises ``UsageError`` if a text is malformed."""
    numbers = ("gpus", "min-replicas", "max-replicas", "target-cpu-percent", "target-queue-ms")
    found: dict[str, Any] = {}
    secrets: list[tuple[str, str]] = []
    for text in given:
        key, _, value = text.partition("=")
        name, _, folder = value.partition(":")
        if key == "secret" and name and folder.startswith("/"):
            secrets.append((name, folder))
        elif key in ("cpu", "memory") and value:
            found[key] = value
        elif key in numbers and value.isascii() and value.isdigit():
            found[key.replace("-", "_")] = int(value)
        else:
            known = f"cpu, memory, {', '.join(numbers)} (a number) or secret (NAME:/folder)"
            raise UsageError(f"--deploy {text} is not understood; write KEY=VALUE with {known}")
    return {**found, "secrets": tuple(secrets)}


def _manifest(kind: str, fields: dict[str, Any], say: Output) -> None:
    from accel.serve.deploy.manifests import KINDS, Deployment, to_yaml

    name = re.sub("[^a-z0-9]+", "-", Path(fields["repository"]).name.lower()).strip("-")
    if not name[:1].isalpha():  # a Service's name has to begin with a letter
        name = f"accel-{name}"
    name = name[:63].rstrip("-")
    documents = KINDS[kind](Deployment(name=name, **fields))
    say.result({"documents": documents}, lambda: to_yaml(documents).rstrip("\n"))


def _check(options: Any, say: Output) -> None:
    from accel.serve.process.check import check

    rows = check(options)

    def human() -> Any:
        from rich.table import Table

        if not rows:
            return f"{options.repository} has no models; a model is a folder in it with its versions: NAME/1/model.onnx"
        table = Table(title=options.repository or None, title_justify="left")
        for column in ("model", "version", "state", "platform", "max batch", "reason"):
            table.add_column(column)
        for row in rows:
            batch = "" if row.max_batch_size is None else str(row.max_batch_size)
            table.add_row(row.name, row.version, row.state, row.platform, batch, row.reason or row.warning)
        return table

    ok = bool(rows) and all(row.state == "READY" for row in rows)
    say.result({"ok": ok, "models": [row.to_json() for row in rows]}, human)
    if not ok:
        sys.exit(1)
