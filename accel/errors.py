"""Everything accel raises on purpose.

    AccelError                      exit code 1: the work was started and failed
    ├── UsageError                  exit code 2: what was asked for has to change first
    │   ├── BadSource               the source can't be found, read or understood
    │   │   └── InvalidModel        the file is not the model it says it is (empty, truncated, corrupt, hostile)
    │   ├── BadInputSpec            an --input, --dim or --profile that contradicts itself or the model
    │   ├── BadData                 calibration or verification data that doesn't fit the model
    │   ├── BadFeeds                inputs to Session.run that don't fit its signature
    │   ├── BadConfig               a training or planning config that can't be read or can't run as it is
    │   ├── BadRepository           a model repository, or a model or config.pbtxt in it, that can't be served
    │   ├── UnknownName             a target, stage, runtime or precision that doesn't exist
    │   ├── UnsupportedHere         a right request that this machine, target or version can't fulfil
    │   └── MissingExtra            a library that is not installed; names the extra
    ├── StageFailed                 a stage could not make its artifact
    │   ├── ExportFailed            no rung of the export ladder gave a right model
    │   ├── BuildFailed             an engine or IR could not be built
    │   └── SignatureDrift          a stage changed names, dtypes, dynamic dims, opset or IR
    ├── GateFailed                  a stage's output differs from its input by more than the limit
    ├── NothingPassed               accel optimize: no candidate passed its gates
    ├── RunFailed                   a loaded model failed on inputs that fit its signature
    │   └── ValuesOutOfRange        because an integer of them picks what is not there; BadFeeds, too
    ├── ChainBroken                 accel inspect --check: a hash doesn't hold
    ├── TrainingFailed              a run stopped: a loss that is no number, a rank that died or hung
    ├── BadCheckpoint               a checkpoint that is damaged, unfinished or of another model
    ├── ChildCrashed                a native library died in its child process
    └── CannotWrite                 no permission, no space, or no such folder

Each message is one sentence of what is wrong, with the fix: ``OpsetTooLow`` is no use without "pass --opset 18".
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar

# A full disk, a full quota, and the limit on the size of a file.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_space(error: BaseException | None) -> OSError | None:
    """The full disk behind ``error``, which a library may have wrapped in errors of its own; None where it is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return error
        error = error.__cause__ or error.__context__
    return None


def one_line(error: object, most: int | None = 300) -> str:
    """An error's text without its line breaks, ``most`` characters of it (None: all): short enough for a terminal."""
    return " ".join(str(error).split())[:most]


def shortened(error: object, most: int = 300) -> str:
    """As ``one_line``; what is longer is cut between words, with "..." for the rest."""
    text = one_line(error, None)
    return text if len(text) <= most else text[: most - 3].rpartition(" ")[0].rstrip(",;:") + "..."


def whole_sentences(error: object, most: int = 240) -> str:
    """As ``one_line``, without a terminal's colours and cut after the last sentence that fits; where not even the first
    one does, between words, with "..." for the rest."""
    text = one_line(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), None)
    if len(text) <= most:
        return text
    ends = [found.start() for found in re.finditer(r"(?<=[.!?]) ", text[: most + 1])]
    return text[: ends[-1]] if ends else shortened(text, most)


class AccelError(Exception):
    """The root of the tree; ``exit_code`` is what the CLI exits with."""

    exit_code: ClassVar[int] = 1


class UsageError(AccelError):
    """What was asked for has to change before any work can start."""

    exit_code: ClassVar[int] = 2


class BadSource(UsageError):
    """The source can't be found, read or understood."""


class InvalidModel(BadSource):
    """The file is not the model it says it is: empty, truncated, corrupt or hostile."""


class BadInputSpec(UsageError):
    """An input, dim or profile specification that contradicts itself or the model."""


class BadData(UsageError):
    """Calibration or verification data that doesn't fit the model."""


class BadFeeds(UsageError):
    """Inputs to ``Session.run`` that don't fit the session's signature."""


class BadConfig(UsageError):
    """A training or planning config that can't be read, or can't run as it is."""


class BadRepository(UsageError):
    """A model repository, or a model or ``config.pbtxt`` in it, that can't be served."""


class UnknownName(UsageError):
    """A target, stage, runtime or precision that doesn't exist."""


class UnsupportedHere(UsageError):
    """A right request that this machine, target or library version can't fulfil."""


class MissingExtra(UsageError):
    """A library that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(what, extra)  # both in args, so that the error survives pickling
        self.what = what
        self.extra = extra

    def __str__(self) -> str:
        return f'{self.what} is not installed; run: pip install "accel-toolchain[{self.extra}]"'


class StageFailed(AccelError):
    """A stage could not make its artifact."""


class ExportFailed(StageFailed):
    """No rung of the export ladder gave a right model."""


class BuildFailed(StageFailed):
    """An engine or an IR could not be built."""


class SignatureDrift(StageFailed):
    """A stage changed names, dtypes, dynamic dims, opset or IR that it had to keep."""


class GateFailed(AccelError):
    """A stage's output differs from its input by more than the gate's limit; by ``value``, where both could run."""

    value: float | None = None


class NothingPassed(AccelError):
    """No candidate of ``accel optimize`` passed its gates."""


class RunFailed(AccelError):
    """A loaded model failed on inputs that fit its signature: an index out of range, no memory left."""


class ValuesOutOfRange(RunFailed, BadFeeds):
    """A model failed because an integer input held a number outside the range that the input takes (a token that the
    vocabulary doesn't have): whoever made the inputs has to change them."""


class ChainBroken(AccelError):
    """A file's sha256 is not the one its manifest records."""


class TrainingFailed(AccelError):
    """A training run stopped: a loss that is no number, a rank that died or hung."""


class BadCheckpoint(AccelError):
    """A checkpoint that is damaged, unfinished or of another model."""


class ChildCrashed(AccelError):
    """A native library died in the child process it was kept in."""


class CannotWrite(AccelError):
    """No permission, no space, or no such folder."""
