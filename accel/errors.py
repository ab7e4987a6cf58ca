"""The errors that accel raises on purpose.

    AccelError (exit code 1)
    ├── UsageError (exit code 2)
    │   ├── BadSource
    │   │   ├── InvalidModel
    │   │   ├── FailsOnInputs
    │   │   └── RandomOps
    │   ├── BadInputSpec
    │   ├── BadData
    │   ├── BadFeeds
    │   ├── BadConfig
    │   ├── BadRepository
    │   ├── UnknownName
    │   ├── UnsupportedHere
    │   └── MissingExtra
    ├── StageFailed
    │   ├── ExportFailed
    │   ├── BuildFailed
    │   └── SignatureDrift
    ├── GateFailed
    ├── NothingPassed
    ├── RunFailed
    │   └── ValuesOutOfRange
    ├── ChainBroken
    ├── TrainingFailed
    ├── BadCheckpoint
    ├── ChildCrashed
    └── CannotWrite

Each message is one sentence that says what is wrong and how to fix it.
``accel.spelling.option`` spells options in messages, as ``opset=18`` in Python and ``--opset 18`` on the command line.
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar

# The error numbers of a full disk, an exhausted quota and a file above the size limit.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_space(error: BaseException | None) -> OSError | None:
    """Returns the ``OSError`` about a full disk if a full disk caused ``error``, else None. Also finds an ``OSError``
    that a library wrapped in another error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return error
        error = error.__cause__ or error.__context__
    return None


def one_line(error: object, most: int | None = 300) -> str:
    """Returns an error's text in one line, cut to ``most`` characters, or uncut if ``most`` is None."""
    return " ".join(str(error).split())[:most]


def kind_of(value: object) -> str:
    """Returns words for the type of a value in a message: "an int", "a list", or "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def shortened(error: object, most: int = 300) -> str:
    """Returns an error's text in one line. A text with more than ``most`` characters is cut between words and ends in
    "..."."""
    text = one_line(error, None)
    return text if len(text) <= most else text[: most - 3].rpartition(" ")[0].rstrip(",;:") + "..."


def library_text(error: BaseException, most: int = 2000) -> str:
    """Returns the text of the library's error that caused ``error``, or "" if no error of another library did."""
    text = ""
    while error.__cause__ is not None:
        error = error.__cause__
        if not isinstance(error, AccelError):
            text = f"{type(error).__name__}: {one_line(error, most)}"
    return text


def whole_sentences(error: object, most: int = 240) -> str:
    """Returns an error's text in one line, without terminal colors, cut after the last sentence that fits.

    If not even the first sentence fits, the text is cut between words and ends in "...".
    """
    text = one_line(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), None)
    if len(text) <= most:
        return text
    ends = [found.start() for found in re.finditer(r"(?<=[.!?]) ", text[: most + 1])]
    return text[: ends[-1]] if ends else shortened(text, most)


def install_command(extra: str | None) -> str:
    """Returns the command that installs the dependencies of an extra of accel. None is accel without extras.

    pip finds the extra in the installed accel, so the command works for every installation, and outside a checkout.
    """
    return f'pip install "accel-toolchain[{extra}]"' if extra else "pip install accel-toolchain"


class AccelError(Exception):
    """The base class of accel's errors. ``exit_code`` is the exit code of the command line."""

    exit_code: ClassVar[int] = 1


class UsageError(AccelError):
    """The user has to change the request before any work can start."""

    exit_code: ClassVar[int] = 2


class BadSource(UsageError):
    """The source can't be found, read or understood."""


class InvalidModel(BadSource):
    """The file is no valid model, because it is empty, truncated, corrupt or hostile, or because a runtime has no
    support for the model. ``reason`` is the runtime's message, or ""."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class FailsOnInputs(BadSource):
    """A source fails in its own framework on inputs of the given shapes. ``reason`` is the error message without the
    advice."""

    reason: str = ""


class RandomOps(BadSource):
    """A TensorFlow graph still holds random ops, such as dropout. The option ``strip_training_ops`` removes dropout."""


class BadInputSpec(UsageError):
    """An input, dim or profile specification that contradicts itself or the model."""


class BadData(UsageError):
    """Calibration or verification data that doesn't fit the model."""


class BadFeeds(UsageError):
    """Inputs to ``Session.run`` that don't fit the session's signature."""


class BadConfig(UsageError):
    """A config for training or planning that can't be read or has invalid settings."""


class BadRepository(UsageError):
    """A model repository, a model or a ``config.pbtxt`` that can't be served."""


class UnknownName(UsageError):
    """A target, stage, runtime or precision that doesn't exist."""


class UnsupportedHere(UsageError):
    """A valid request that this machine, target or library version can't fulfill."""


class MissingExtra(UsageError):
    """A library is not installed. ``what`` is the library, and ``extra`` is the pip extra that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(what, extra)  # puts ``what`` and ``extra`` into ``args``, so that the error survives pickling
        self.what = what
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.what} is not installed; run: {install_command(self.extra)}"


class StageFailed(AccelError):
    """A stage could not make its artifact."""


class ExportFailed(StageFailed):
    """No exporter gave a correct model."""


class BuildFailed(StageFailed):
    """An engine or an OpenVINO model could not be built."""


class SignatureDrift(StageFailed):
    """A stage changed a name, a dtype, a dynamic dim, the opset or the IR version."""


class GateFailed(AccelError):
    """A stage's output differs from its input by more than the gate's limit.

    ``value`` is the relative error, or None if the model before or after the stage could not run. ``finding`` is the
    message without the path of the rejected file. If no rejected file was saved, ``finding`` is empty.
    """

    value: float | None = None
    finding: str = ""


class NothingPassed(AccelError):
    """No candidate of ``accel optimize`` passed its gates."""


class RunFailed(AccelError):
    """A loaded model failed on inputs that fit its signature, for example because memory ran out."""


class SizeBeyond(RunFailed):
    """A model failed at a size of a dim that is larger than the largest size of the dim's range."""


class ValuesOutOfRange(RunFailed, BadFeeds):
    """A model failed because an integer input is out of range, such as a token id beyond the vocabulary.

    Derives from ``BadFeeds``, because the caller has to change the inputs.
    """


class ChainBroken(AccelError):
    """A file's sha256 differs from the sha256 in its manifest."""


class TrainingFailed(AccelError):
    """A training run stopped because the loss is not finite, or because a rank died or hung."""


class BadCheckpoint(AccelError):
    """A checkpoint is damaged, is unfinished or belongs to another model."""


class ChildCrashed(AccelError):
    """A native library died in its child process. ``died`` is the signal or the exit code of the process."""

    died: str = ""


class CannotWrite(AccelError):
    """A file can't be written, because the permission, the disk space or the folder is missing."""
