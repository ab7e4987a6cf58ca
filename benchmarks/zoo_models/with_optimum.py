"""Exports a model of transformers with optimum, and compares the files with the model."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from .case import Case
from .compare import call, copied, judged


def with_optimum(case: Case, calls: Sequence[tuple[int, int, Any, Any]], folder: Path) -> dict[str, Any]:
    """Exports the model as ``optimum-cli export onnx`` does, and runs the files at the sizes of ``calls``.

    If the task that optimum infers doesn't work, tries every other task that optimum has for the architecture. Returns
    the result of the first task that works, or of the inferred task.
    """
    import optimum.exporters.onnx.model_configs  # noqa: F401 - registers the architectures
    from optimum.exporters.tasks import TasksManager

    results = []
    kind = case.module.config.model_type
    supported: Sequence[str] = ()
    with contextlib.suppress(KeyError):  # optimum has no config for this architecture
        supported = tuple(TasksManager.get_supported_tasks_for_model_type(kind, "onnx", library_name="transformers"))
    for task in (None, *supported):
        if task and task.endswith("-with-past"):  # the zoo's models run without a cache
            continue
        place = folder / (task or "inferred")
        try:
            results.append(_with_task(case, calls, place, task or TasksManager.infer_task_from_model(case.module)))
        except Exception as error:  # an exporter may raise anything
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            results.append({"class": "failed", "message": message})
        if results[-1]["class"] == "first":
            return results[-1]
    return results[0]


def _with_task(case: Case, calls: Sequence[tuple[int, int, Any, Any]], folder: Path, task: str) -> dict[str, Any]:
    """Exports the model for ``task``, and runs the files.

    optimum leaves out some of a model's outputs. Only the outputs that both sides have are compared, by their names. An
    encoder-decoder becomes two files, which run one after the other.
    """
    from optimum.exporters.onnx import onnx_export_from_model

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
        onnx_export_from_model(case.module, folder, task=task, do_validation=False)
    files = {path.stem: onnxruntime.InferenceSession(str(path)) for path in sorted(folder.glob("*.onnx"))}
    worst = 0.0
    for batch, size, arguments, _ in calls:
        where = f"at batch {batch}" + (f", size {size}" if size else "")
        result = call(case.module, copied(arguments))
        try:
            found = _ran(files, arguments)
        except Exception as error:  # a runtime may raise anything
            return {"class": "failed", "message": f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"}
        same = [name for name in found if isinstance(result.get(name), torch.Tensor)]
        if not same:
            return {"class": "failed", "message": f"the files have other outputs than the model: {', '.join(found)}"}
        ours, theirs = [torch.from_numpy(found[name]) for name in same], [result[name] for name in same]
        apart, right = judged(_Only(case.module, same), arguments, ours, theirs)
        if not right:
            return {"class": "wrong", "message": f"{where}: the relative error is {apart:.2g}"}
        worst = max(worst, apart)
    return {"class": "first", "message": "", "error": worst}


class _Only(torch.nn.Module):
    """Returns only some outputs of a model."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, **arguments: Any) -> list[torch.Tensor]:
        result = self.module(**arguments)
        return [result[name] for name in self.names]


def _ran(files: Mapping[str, Any], arguments: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Runs the only file, or the encoder and then the decoder."""
    feeds = {name: value.numpy() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    if "model" in files:
        return _outputs(files["model"], feeds)
    encoded = _outputs(files["encoder_model"], feeds)
    decoder = {
        "input_ids": feeds["decoder_input_ids"],
        "encoder_hidden_states": encoded["last_hidden_state"],
        "encoder_attention_mask": feeds.get("attention_mask"),
    }
    return _outputs(files["decoder_model"], decoder)


def _outputs(session: Any, feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Runs a session. Adds the inputs that users of transformers usually don't pass: positions and token types."""
    given = dict(feeds)
    ids = given.get("input_ids")
    if ids is not None:
        given.setdefault("position_ids", np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
        given.setdefault("token_type_ids", np.zeros_like(ids))
        given.setdefault("attention_mask", np.ones_like(ids))
    wanted = [one.name for one in session.get_inputs()]
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(None, {name: given[name] for name in wanted}), strict=True))
