"""Tries one exporter with one model, in a child process of the zoo."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from accel.child import resolve
from accel.converters.graph import simplify
from zoo_models.case import Case, NotMade, make

EXPORT_BATCH, OTHER_BATCHES = 2, (3, 5)
# The largest distance between the outputs of an optimized model and of the model, on inputs that the optimizer didn't
# see. On inputs that it draws itself, the optimizer's limit is the default of ``max_drop``, 0.01.
DISTANCE_LIMIT = 0.05
# The arguments of accel.export that an error message may ask for.
_ADVICE = re.compile(r"\b(limit|dims|inputs|opset)=")


def run(family: str, name: str, tool: str, optimize: float, apart: bool, out: str) -> None:
    """Tries ``tool`` with a model, and writes the result as JSON to ``out``.

    If ``apart`` is true, accel simplifies the graph in a child process, as it does by default. If ``apart`` is false,
    accel simplifies the graph in this process, because the start of another interpreter takes time.
    """
    os.setsid()  # the parent kills the whole process group
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        os.environ["ACCEL_CACHE_DIR"] = str(Path(folder, "cache"))
        tempfile.tempdir = folder  # the models' files go away with the folder
        with contextlib.nullcontext() if apart else mock.patch.object(simplify, "run_in_child", _here):
            found = outcome(family, name, tool, optimize, Path(folder))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # a library's threads could keep the process alive


def _here(target: str, /, **arguments: Any) -> Any:
    """Calls ``target`` in this process, with all arguments except ``timeout`` and ``hidden``."""
    return resolve(target)(**{name: value for name, value in arguments.items() if name not in ("timeout", "hidden")})


def outcome(family: str, name: str, tool: str, optimize: float, folder: Path) -> dict[str, Any]:
    """Tries ``tool`` with a model. Returns the class of the result, the message and the time."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with _silent():
            case = make(family, name)
            calls = _calls(case)
    except Exception as error:  # a library may raise anything
        # optimum needs an older transformers, which lacks some of the models.
        unmade = "not tried" if tool == "optimum" else "not made"
        name_of_error = "" if isinstance(error, NotMade) else f"{type(error).__name__}: "
        return {"class": unmade, "message": f"{name_of_error}{_line(error)}"}
    started = time.monotonic()
    trial = {"accel": partial(_with_accel, family, name), "torch.onnx": _with_torch, "optimum": _with_optimum}[tool]
    try:
        found = trial(case, calls, folder)
        if tool == "accel" and optimize and found["class"] in ("first", "followed"):
            found |= _optimized(case, calls, optimize, folder)
    except Exception as error:  # an exporter may raise anything
        found = {"class": "failed", "message": f"{type(error).__name__}: {_line(error)}"}
    return found | {"seconds": round(time.monotonic() - started, 1)}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _line(error: object) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).rpartition("## Exception summary")[2]
    text = re.sub(r"\S*/zoo-\w+/(\S*/)?", "", text)  # leaves out the temporary folder of the try
    return " ".join(text.split())[:700]


# For each call of the model: the batch, the size, the arguments, and the tensors in the model's result.
Calls = list[tuple[int, int, Any, Any]]


def _calls(case: Case) -> Calls:
    """Runs the model twice at the exported size with different inputs, and then at other batches and sizes.

    Raises ``NotMade`` if the model fails at the exported size or returns no finite tensor. Leaves out calls at other
    batches or sizes in which the model itself fails.
    """
    import torch

    from zoo_models.compare import call, copied, leaves

    found: Calls = []
    wanted = [(EXPORT_BATCH, case.sizes[0]), (EXPORT_BATCH, case.sizes[0])]
    wanted += [(batch, size) for batch, size in zip(OTHER_BATCHES, (case.sizes[1:] or case.sizes) * 2, strict=False)]
    for index, (batch, size) in enumerate(wanted):
        torch.manual_seed(index)
        arguments = case.example(batch, size)
        try:
            found.append((batch, size, arguments, leaves(call(case.module, copied(arguments)))))
        except Exception as error:  # a model may raise anything
            if index < 2:
                raise NotMade(f"the model fails in eager mode: {type(error).__name__}: {_line(error)}") from error
    if not found[0][3]:
        raise NotMade("it returns no tensor")
    if any(not bool(torch.isfinite(t).any()) for t in found[0][3] if t.is_floating_point() and t.numel()):
        raise NotMade("its outputs are not finite")
    return found


def _with_accel(family: str, name: str, case: Case, calls: Calls, folder: Path) -> dict[str, Any]:
    """Exports the model as a user does, and compares outputs at sizes that the export didn't see.

    If the export fails, does once what the error message advises. The message may suggest arguments, such as
    ``limit=0.002``, or a change of the model's source (see ``zoo_models.rewritten``).
    """
    from accel.errors import AccelError
    from zoo_models.compare import LIMIT, error
    from zoo_models.rewritten import REWRITES, rewritten

    try:
        return _exported(case, calls, folder, {}, "first", "")
    except AccelError as failed:
        message = f"{type(failed).__name__}: {_line(failed)}"
        advice = _advice(str(failed))
        other = rewritten(family, name, case, str(failed), folder)
    if other is not None:
        again = _calls(other)
        if not REWRITES[family, name].arbitrary:
            for (*_, wanted), (*_, found) in zip(calls, again, strict=True):
                if error(found, wanted) > LIMIT:
                    return {"class": "failed", "message": f"{message} / the rewritten model has other outputs"}
        case, calls = other, again
    elif (
        _draws_random_numbers(case, calls[0][2])
        or (case.refusal and case.refusal in message)
        or ("float32 is not enough" in message and _needs_float64(case, calls[0]))
    ):
        return {"class": "refused", "message": message}
    elif not advice:
        return {"class": "failed", "message": message}
    try:
        return _exported(case, calls, folder, {} if other is not None else advice, "followed", message)
    except AccelError as again:
        return {"class": "failed", "message": f"{message} / then: {_line(again)}"}


def _exported(
    case: Case, calls: Calls, folder: Path, advice: dict[str, Any], kind: str, message: str
) -> dict[str, Any]:
    """Exports the model with the arguments ``advice``, and compares the file with the model. Returns a result of the
    class ``kind`` if the file is right. Raises ``AccelError`` if the export fails."""
    import accel
    from accel.errors import BadFeeds

    given: dict[str, Any] = dict(case.words)
    if calls[0][2] is not None and not isinstance(case.module, os.PathLike):  # a file knows the shapes of its inputs
        given["example"] = calls[0][2]
    if case.dynamic:
        given["dynamic"] = case.dynamic
    with _silent():
        artifact = accel.export(case.module, out=folder / "model.onnx", **{**given, **advice})
    dims = dict(artifact.signature.dims)
    several = sorted({batch for batch, *_ in calls})
    with accel.load(artifact) as session:
        # The user who follows advice about ranges doesn't give sizes beyond them.
        compared = _compared(case, calls[1:], session, bool(dims), refusal=BadFeeds if "dims" in advice else ())
    notes = {"dims": {name: bounds.to_json() for name, bounds in dims.items()}}
    if compared["problem"]:
        return {"class": "wrong", "message": f"{message} {compared['problem']}".strip(), **notes}
    if not dims and len(several) > 1 and kind == "first":
        live = artifact.source.get("live") or {}
        return {"class": "failed", "message": f"the batch is not dynamic: {live.get('note', '')}", **notes}
    return {"class": kind, "message": message, "error": compared["error"], **notes}


def _advice(message: str) -> dict[str, Any]:
    """Returns the arguments that an error message advises, with their values, such as ``limit=0.002``."""
    found: dict[str, Any] = {}
    for match in _ADVICE.finditer(message):
        rest = message[match.end() :]
        for end in range(len(rest), 0, -1):
            with contextlib.suppress(ValueError, SyntaxError):
                found.setdefault(match[1], ast.literal_eval(rest[:end].strip().rstrip(";,.)") if end else ""))
                break
    return found


def _draws_random_numbers(case: Case, arguments: Any) -> bool:
    import torch

    from zoo_models.compare import call, copied, error, leaves

    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(leaves(call(case.module, copied(arguments))))
    return error(results[0], results[1]) > 0


def _needs_float64(case: Case, first: tuple[int, int, Any, Any]) -> bool:
    """Tells whether the model's outputs in float32 differ much from its outputs in float64."""
    from zoo_models.compare import LIMIT, call, copied, error, in_double, leaves

    *_, arguments, wanted = first
    return error(wanted, leaves(call(copied(case.module).double(), in_double(arguments)))) > LIMIT


def _compared(
    case: Case, calls: Calls, run: Any, any_size: bool, refusal: type[Exception] | tuple[()] = ()
) -> dict[str, Any]:
    """Compares the outputs of ``run`` with the model's outputs in each call. If ``any_size`` is false, compares only
    the calls at the exported batch and size. Skips a call that raises ``refusal``, unless all calls do."""
    from zoo_models.compare import call, copied, judged, leaves

    worst, problem = 0.0, "no call ran"
    for batch, size, arguments, wanted in calls:
        if not any_size and (batch, size) != (EXPORT_BATCH, case.sizes[0]):
            continue
        where = f"at batch {batch}" + (f", size {size}" if size else "")
        try:
            with _silent():
                found = leaves(call(run, copied(arguments)))
        except refusal as error:
            problem = f"{where}: {_line(error)}" if problem else ""
            continue
        except Exception as error:  # a runtime may raise anything
            return {"problem": f"{where}: {type(error).__name__}: {_line(error)}", "error": None, "ran": False}
        if len(found) != len(wanted):
            return {"problem": f"{len(found)} outputs, the model has {len(wanted)}", "error": None, "ran": False}
        apart, right = judged(case.module, arguments, found, wanted)
        if not right:
            return {"problem": f"{where}: the relative error is {apart:.2g}", "error": apart, "ran": True}
        worst, problem = max(worst, apart), ""
    return {"problem": problem, "error": worst, "ran": not problem}


def _with_torch(case: Case, calls: Calls, _: Path) -> dict[str, Any]:
    """Exports the model with ``torch.onnx.export`` alone, and compares the outputs with the model's outputs in
    ``calls``."""
    import torch

    if not case.is_torch:
        return {"class": "not tried", "message": "no model of PyTorch"}
    arguments = calls[0][2]
    takes_batches = len({batch for batch, *_ in calls}) > 1
    shapes = _dynamic_shapes(case, arguments, takes_batches)
    named = isinstance(arguments, dict)
    args, kwargs = ((), arguments) if named else (arguments, {})
    with _silent(), torch.no_grad():
        program = torch.onnx.export(case.module, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False)
        program.initialize_inference_session()

    def run(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    found = _compared(case, calls[1:], run, takes_batches)
    if found["problem"]:
        return {"class": "wrong" if found["ran"] else "failed", "message": found["problem"]}
    return {"class": "first", "message": "", "error": found["error"]}


def _with_optimum(case: Case, calls: Calls, folder: Path) -> dict[str, Any]:
    from zoo_models.with_optimum import with_optimum

    return with_optimum(case, calls, folder)


def _dynamic_shapes(case: Case, arguments: Any, takes_batches: bool) -> Any:
    """Returns dynamic shapes for all tensors with a batch axis. torch itself decides whether an axis stays fixed."""
    import torch

    auto = torch.export.Dim.AUTO

    def shape(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {0: auto} if takes_batches and value.ndim and value.shape[0] == EXPORT_BATCH else None
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return type(value)(map(shape, value)) if isinstance(value, list | tuple) else None

    found = shape(arguments)
    if case.dynamic and isinstance(arguments, dict):
        found |= {name: dict.fromkeys(axes, auto) for name, axes in case.dynamic.items()}
    elif case.dynamic:
        named = list(case.dynamic.values())
        found = tuple(dict.fromkeys(named[i], auto) if i < len(named) else one for i, one in enumerate(found))
    return found


def _optimized(case: Case, calls: Calls, seconds: float, folder: Path) -> dict[str, Any]:
    """Runs ``accel optimize`` on the exported file, and compares the result with the model's outputs in ``calls``.

    Returns the speedup or the word ``failed``, ``wrong`` or ``unmeasured``, the name of the chosen candidate, the
    distance of its outputs, the reasons why other candidates were rejected, and whether other work disturbed the
    measurement.
    """
    import accel

    started = time.monotonic()
    try:
        with _silent():
            fast = accel.optimize(folder / "model.onnx", out=folder / "fast", budget_seconds=seconds)
            taken = {"optimize_seconds": round(time.monotonic() - started, 1)}
            distance = _distance(case, calls[1:], folder / "fast", bool(fast.artifact.signature.dims))
    except Exception as error:  # the result of the try contains the error message
        return {"optimize": "failed", "optimize_message": f"{type(error).__name__}: {_line(error)}"}
    rejected = {row.name: _line(row.reason)[:300] for row in fast.candidates if row.status == "rejected"}
    facts = taken | {"chosen": fast.chosen, "distance": distance, "rejected": rejected}
    if fast.environment.get("statistic", "median") != "median":
        facts["busy"] = True
    if distance > DISTANCE_LIMIT:
        message = f"the distance of the outputs of {fast.chosen} is {distance:.2g}"
        return facts | {"optimize": "wrong", "optimize_message": message}
    if fast.speedup is None:  # the file is right, but nothing says how fast it is
        return facts | {"optimize": "unmeasured"}
    return facts | {"optimize": f"{fast.speedup:.2f}"}


def _distance(case: Case, calls: Calls, optimized: Path, any_size: bool) -> float:
    """Returns the largest distance of an output of the optimized model from the model's output in ``calls``.

    Returns infinity if a shape or the number of outputs differs. If ``any_size`` is false, uses only the calls at the
    exported size.
    """
    import accel
    from accel.proof.concordance import discordance
    from zoo_models.compare import call, copied, leaves

    worst = 0.0
    with accel.load(optimized) as session:
        for batch, size, arguments, wanted in calls:
            if not any_size and (batch, size) != (EXPORT_BATCH, case.sizes[0]):
                continue
            found = leaves(call(session, copied(arguments)))
            if [tuple(t.shape) for t in found] != [tuple(t.shape) for t in wanted]:
                return float("inf")
            for one, other in zip(found, wanted, strict=True):
                worst = max(worst, discordance([_real(other)], [_real(one)]))
    return worst


def _real(value: Any) -> Any:
    import torch

    return (torch.view_as_real(value) if value.is_complex() else value).float().numpy()
