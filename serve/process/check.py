"""Implements ``accel serve --check``, which loads and warms up every model of a repository. The command reports which
models can be served."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..models import loading
from .options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """The result for one version of a model. ``state`` is ``READY``, or ``UNAVAILABLE`` with a ``reason``. ``warning``
    is the error of a failed run on random inputs. A failed run on random inputs is only a warning, because even a good
    model may refuse random inputs."""

    name: str
    version: str
    state: str
    reason: str = ""
    platform: str = ""
    max_batch_size: int | None = None
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(options: ServeOptions) -> list[CheckedModel]:
    """Loads, warms up and releases every model of ``options``, and reads the files that ``options`` names.

    Returns one result for each version of each model.
    """
    options.tls()
    warm_up = _WarmUp()
    server = replace(options, mode="none", trace=None).open_server()
    loading.log.addHandler(warm_up)
    try:
        server.repository.start()
        loaded = {(m.name, m.version): m for m in server.repository.models()}
        rows = []
        for row in server.repository.index():
            model = loaded.get((row.name, row.version)) if row.state == "READY" else None
            rows.append(
                CheckedModel(
                    name=row.name,
                    version=row.version,
                    state=row.state or "UNAVAILABLE",
                    reason=row.reason,
                    platform=model.config.platform if model else "",
                    max_batch_size=model.scheduling.max_batch_size if model else None,
                    warning=warm_up.failed.get(row.name, "") if model else "",
                )
            )
        return rows
    finally:
        loading.log.removeHandler(warm_up)
        server.close()


class _WarmUp(logging.Handler):
    """Reads the log, and collects the models that refused the random inputs of their warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == loading.WARM_UP_FAILED:
            said = vars(record)
            self.failed[said["model"]] = f"random inputs failed: {said['reason']}"
