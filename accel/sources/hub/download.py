"""Finds a model of the Hugging Face Hub in the cache of huggingface_hub, or downloads the model to this cache."""

from __future__ import annotations

import contextvars
import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import text_sha256
from accel.cache import StageCache
from accel.cancel import check_interrupted
from accel.errors import BadSource, install_command
from accel.progress import report
from accel.version import __version__

from ..nearby import or_nearby
from .choice import choose, with_external_data
from .model_id import ModelId
from .refusal import refuse

_SECONDS = 10.0


@dataclass(frozen=True)
class Located:
    """Describes a model of the Hugging Face Hub that is stored on this machine. ``path`` is a folder or an ONNX file.
    ``spec`` is the id with the commit, so it always refers to the same files. ``name`` is the id that the user gave.
    ``facts`` holds the id, the revision and the commit for the manifest."""

    path: Path
    spec: str
    name: str
    facts: dict[str, str]


# The models that this process has located. An id refers to the same commit until the process ends.
_located: dict[ModelId, Located] = {}


def locate(asked: ModelId) -> Located:
    """Finds the model ``asked`` in the cache, and downloads missing files. Without a network connection, uses only the
    cached files.

    Raises ``BadSource`` if the model doesn't exist, can't be downloaded, or has no file that accel reads. Raises
    ``CannotWrite`` if the cache can't be written.
    """
    known = _located.get(asked)
    if known is not None and known.path.exists():
        return known
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise BadSource(
            f"{str(asked)!r} is no file or folder here, and huggingface_hub has to be installed to read models of the "
            f"Hugging Face Hub; {or_nearby(str(asked))}, or run: {install_command('examples')}"
        ) from error
    try:
        names = _names(asked)
    except Exception as error:  # the library's errors have no common base class
        folder = _cached_folder(asked)
        if folder is None:
            refuse(asked, error)
        names = _names_in(asked, folder)
        choice = with_external_data(choose(asked, names), folder, names)
        if missing := _missing(folder, choice.files):
            refuse(asked, error, missing)
    else:
        choice = choose(asked, names)
        folder = _downloaded(asked, choice.files)
        # Only the ONNX file itself knows the names of the files with its weights.
        whole = with_external_data(choice, folder, names)
        folder, choice = folder if whole == choice else _downloaded(asked, whole.files), whole
    commit = folder.name
    found = Located(
        path=_opened_path(folder, choice.files, choice.main),
        spec=str(ModelId(asked.repo, commit, asked.file)),
        name=str(asked),
        facts={"id": asked.repo, "revision": asked.revision or "main", "commit": commit},
    )
    _located[asked] = _located[ModelId(asked.repo, commit, asked.file)] = found
    return found


def _downloaded(asked: ModelId, files: Sequence[str]) -> Path:
    """Downloads the missing ones of ``files``, and returns the folder of the revision."""
    import huggingface_hub

    report(f"download {asked}")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                asked.repo,
                revision=asked.revision or None,
                allow_patterns=list(files),
                library_name="accel",
                library_version=__version__,
                tqdm_class=_bar(f"download {asked}"),
            )
        )
    except Exception as error:
        refuse(asked, error, _missing(_cached_folder(asked), files))


def _names(asked: ModelId) -> Sequence[str]:
    """Returns the names of all files of the repository. Asks the Hugging Face Hub, unless the cache has the commit's
    list of files."""
    import huggingface_hub

    if (known := _listing(asked)) is not None:
        return known
    api = huggingface_hub.HfApi(library_name="accel", library_version=__version__)
    info = api.model_info(asked.repo, revision=asked.revision or None, timeout=_SECONDS)
    return [file.rfilename for file in info.siblings or ()]


def _listing(asked: ModelId) -> list[str] | None:
    """Returns the names of a commit's files from the cached list of files. Returns None for a branch, and for a commit
    without a cached list. Older versions of huggingface_hub don't cache lists of files."""
    import huggingface_hub

    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if listed is None or not asked.commit:
        return None
    try:
        return [file.path for file in listed(asked.repo, revision=asked.commit)]
    except Exception:  # the callers use a fallback if the result is None
        return None


def _cached_folder(asked: ModelId) -> Path | None:
    """Returns the revision's folder in the cache, or None. Some of the revision's files may be missing in the
    folder."""
    import huggingface_hub

    try:
        # Without ``allow_patterns``, ``snapshot_download`` would refuse a folder in which any file of the repository is
        # missing.
        found = huggingface_hub.snapshot_download(
            asked.repo, revision=asked.revision or None, local_files_only=True, allow_patterns=[]
        )
    except Exception:  # the caller raises an error with a better reason
        return None
    return Path(found)


def _missing(folder: Path | None, names: Sequence[str]) -> list[str]:
    return [name for name in names if folder is None or not (folder / name).is_file()]


def _names_in(asked: ModelId, folder: Path) -> list[str]:
    """Returns the names of all files of a cached revision. If the cache has no list of the revision's files, returns
    the names of the downloaded files."""
    listed = _listing(ModelId(asked.repo, folder.name))
    return listed or [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def _opened_path(folder: Path, files: Sequence[str], main: str) -> Path:
    """Returns the path to open. Copies an ONNX file with external data to accel's cache. The cache of huggingface_hub
    consists of symbolic links, and onnx refuses external data behind a link."""
    if len(files) == 1 or not main:
        return folder / main
    cache = StageCache()
    key = text_sha256(f"{folder} {main} {' '.join(files)}")
    kept = cache.entry(key) / Path(main).name
    if not kept.is_file():
        with cache.scratch() as scratch:
            for name in files:
                shutil.copyfile(folder / name, scratch / Path(name).name)
            cache.keep(key, scratch)
    return kept


def _bar(message: str) -> type[Any]:
    """Returns a tqdm class that reports progress to accel instead of drawing a progress bar."""
    from tqdm import tqdm

    context = contextvars.copy_context()  # files are downloaded in other threads

    class Reported(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            check_interrupted()  # stops the download threads after Ctrl-C
            shown: bool | None = super().update(n)
            return shown

        def display(self, *_: Any, **__: Any) -> None:
            if self.total and self.unit == "B":
                context.copy().run(report, message, min(1.0, self.n / self.total))

    return Reported
