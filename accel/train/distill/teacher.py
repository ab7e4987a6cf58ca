"""Opens a teacher and adds its losses to the loss of a student."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.artifact import Artifact
from accel.errors import BadConfig, kind_of, one_line
from accel.sources.source import Source

from ..batch import call, to_device
from ..config.schema import DistillationConfig, TrainConfig
from ..model_loss import tensor_of
from ..precision.modes import parameter_dtype
from .losses import of_attention, of_hidden, of_logits, over_counted
from .record import Recorder

# The names of the two parts of the loss in the log.
FIGURES = ("task_loss", "teacher_loss")


def open_teacher(config: DistillationConfig) -> nn.Module | Artifact:
    """Returns the teacher: a module of PyTorch in eval mode, or an artifact of another kind.

    Raises ``BadConfig`` for a teacher that isn't PyTorch if hidden states or attention are compared, and the errors of
    ``Source.open``.
    """
    source = Source(config.teacher, weights=config.weights or None)
    if source.native and source.form is None:
        from accel.sources.torch.source import find

        hub = source.hub_model
        found = find(hub.spec if hub else source.text, Path(config.weights) if config.weights else None, "")
        return found.module
    artifact = source.open()
    if config.hidden or config.attention:
        raise BadConfig(
            f"the teacher {config.teacher} has the kind {artifact.kind}, whose hidden states and attention aren't "
            "seen; use a teacher of PyTorch, or distillation.hidden = 0 and distillation.attention = 0"
        )
    return artifact


def parameters(config: DistillationConfig) -> int:
    """Returns the number of parameters of a teacher that runs beside the student, or 0."""
    teacher = open_teacher(config) if config.teacher else None
    return sum(p.numel() for p in teacher.parameters()) if isinstance(teacher, nn.Module) else 0


class Lessons:
    """Adds the losses against a teacher to the loss of ``student``. ``teacher`` is a module, or None if its logits come
    with the targets."""

    def __init__(
        self, config: TrainConfig, student: nn.Module, teacher: nn.Module | None, device: torch.device
    ) -> None:
        self.config, self.device = config.distillation, device
        self.mode = config.precision.resolved
        self.seen = torch.zeros(2, dtype=torch.float64, device=device)
        self.teacher: nn.Module | None = None
        if teacher is not None:
            self.teacher = teacher.to(device=device, dtype=torch.float32).requires_grad_(False)
            with suppress(NotImplementedError):  # an exported program is in eval mode
                self.teacher.eval()
        told = {"hidden": self.config.hidden > 0, "attention": self.config.attention > 0}
        self.of_student = Recorder(student, **told)
        self.of_teacher = Recorder(self.teacher, **told) if self.teacher is not None else None

    def watching(self) -> AbstractContextManager[None]:
        """Returns the context in which the student runs."""
        return self.of_student.running()

    def add(
        self, inputs: Any, outputs: Any, targets: Any, logits: Any, total: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        """Returns the loss ``total`` together with the losses against the teacher, as a sum over ``count`` targets.

        ``logits`` are the teacher's logits if the teacher ran before training.
        """
        config = self.config
        if self.teacher is not None:
            logits = self._taught(inputs)
        distance = total.new_zeros((), dtype=torch.float32)
        if config.logits:
            each = of_logits(_logits(outputs, "student"), logits, config.temperature)
            distance = distance + config.logits * over_counted(each, targets, count)
        if self.of_teacher is not None and config.hidden:
            for one, two in _pairs(self.of_student.hidden, self.of_teacher.hidden, "blocks", "hidden"):
                distance = distance + config.hidden * over_counted(of_hidden(one, two), targets, count)
        if self.of_teacher is not None and config.attention:
            told = "calls of F.scaled_dot_product_attention"
            for one, two in _pairs(self.of_student.attention, self.of_teacher.attention, told, "attention"):
                distance = distance + config.attention * over_counted(of_attention(one, two), targets, count)
        self.seen += torch.stack([total.detach().double(), distance.detach().double()])
        return config.targets * total + distance

    def figures(self) -> dict[str, torch.Tensor]:
        """Returns the sums of both parts of the loss since the last call."""
        found = dict(zip(FIGURES, self.seen, strict=True))
        self.seen = torch.zeros_like(self.seen)
        return found

    def _taught(self, inputs: Any) -> torch.Tensor:
        assert self.teacher is not None
        assert self.of_teacher is not None
        low = parameter_dtype(self.mode) if parameter_dtype(self.mode) != torch.float32 else None
        cast = torch.autocast(self.device.type, dtype=low) if low is not None else nullcontext()
        try:
            with torch.no_grad(), cast, self.of_teacher.running():
                outputs = call(self.teacher, to_device(inputs, self.device, torch.float32))
        except BadConfig:
            raise
        except Exception as error:  # the user's code may raise any exception
            raise BadConfig(
                f"the teacher {self.config.teacher} fails on the student's inputs ({type(error).__name__}: "
                f"{one_line(error, 200)}); take a teacher with the same inputs"
            ) from error
        return _logits(outputs, "teacher")


def _logits(outputs: Any, whose: str) -> torch.Tensor:
    found = tensor_of(outputs) if isinstance(outputs, torch.Tensor) or hasattr(outputs, "logits") else None
    if found is None:
        raise BadConfig(f"the {whose} returns {kind_of(outputs)}; return a tensor, or an object with logits")
    return found


def _pairs(
    student: list[torch.Tensor], teacher: list[torch.Tensor], what: str, key: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs each of the student's layers with a layer of the teacher, at even distances up to the last layer (Jiao et
    al. 2020, "TinyBERT", section 3.1). Raises ``BadConfig`` if a model has no layers, or the student has more."""
    own, known = len(student), len(teacher)
    if not 0 < own <= known:
        raise BadConfig(
            f"the student has {own} {what} and the teacher {known}; take a teacher with at least as many as the "
            f"student, or use distillation.{key} = 0"
        )
    return [(state, teacher[(index + 1) * known // own - 1]) for index, state in enumerate(student)]
