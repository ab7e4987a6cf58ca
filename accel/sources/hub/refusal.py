"""Turns the errors of huggingface_hub into one-sentence errors of accel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NoReturn

from accel.errors import BadSource, CannotWrite, no_space, one_line

from ..nearby import or_nearby
from .model_id import ModelId

_LOG_IN = "run hf auth login or set HF_TOKEN"


def refuse(asked: ModelId, error: Exception, missing: Sequence[str] = ()) -> NoReturn:
    """Raises ``BadSource`` or ``CannotWrite`` for an ``error`` of huggingface_hub. ``missing`` lists the files that the
    cache lacks, and is empty if the files of the model are unknown."""
    from huggingface_hub import constants, errors

    nowhere = f"{str(asked)!r} is no file or folder here, and"
    path = or_nearby(str(asked))
    partly = f"the local cache has only a part of {asked}"
    causes = list(_causes(error))

    def caused_by(*kinds: type[BaseException]) -> BaseException | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if unwritable := no_space(error) or caused_by(PermissionError):
        reason = getattr(unwritable, "strerror", None) or "no permission"
        raise CannotWrite(
            f"can't write {asked} to {constants.HF_HUB_CACHE} ({reason}); free some space, or set HF_HUB_CACHE to a "
            "folder with space that you may write"
        ) from error
    if caused_by(errors.GatedRepoError):
        raise BadSource(f"the model {asked.repo} is gated: ask for access on its page, then {_LOG_IN}") from error
    status = getattr(getattr(caused_by(errors.HfHubHTTPError), "response", None), "status_code", None)
    if caused_by(errors.RepositoryNotFoundError) or status == 401:
        raise BadSource(
            f"{nowhere} the Hugging Face Hub has no public model of this name; {path} or the id, or for a "
            f"private model {_LOG_IN}"
        ) from error
    if caused_by(errors.RevisionNotFoundError):
        raise BadSource(
            f"the model {asked.repo} has no revision {asked.revision!r}; give a branch, a tag or a full commit hash"
        ) from error
    if caused_by(errors.HFValidationError):
        raise BadSource(f"{nowhere} this can't be the name of a model of the Hugging Face Hub; {path}") from error
    if caused_by(errors.OfflineModeIsEnabled):
        offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in os.environ), "")
        unset = f"unset {offline or 'HF_HUB_OFFLINE'} to download it"
        if missing:
            raise BadSource(f"{partly} ({missing[0]} is missing); {unset}") from error
        raise BadSource(
            f"{nowhere} the local cache of the Hugging Face Hub has no such model; {path}, or {unset}"
        ) from error
    reason = f"the hub answers {status}" if status else one_line(causes[-1], 120)
    if missing:
        raise BadSource(f"the download of {asked} broke off ({reason}); try again to continue the download") from error
    raise BadSource(
        f"{nowhere} the Hugging Face Hub can't look up a model of this name ({reason}); {path}, or the network"
    ) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields ``error`` and the errors that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
