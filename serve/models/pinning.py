"""Runs the sessions of an instance group only on the CPU cores that the group's ``host_policy`` selects, as in
Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel.errors import BadRepository

if TYPE_CHECKING:
    import numpy as np

    from accel.runtimes.base import Session
    from accel.signature import Feeds

    from .config import ModelConfig

_MOST_CORES = 4096


def parse_policy(text: str) -> tuple[str, tuple[int, ...]]:
    """Parses a text of the form ``NAME,cpu-cores=0-3,6``, and returns the name and the cores. Raises ``ValueError`` if
    ``text`` is no valid host policy."""
    name, _, setting = text.partition(",")
    key, _, ranges = setting.partition("=")
    if not name or key != "cpu-cores":
        raise ValueError(text)
    cores: set[int] = set()
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < _MOST_CORES:
            raise ValueError(text)
        cores.update(range(first, last + 1))
    return name, tuple(sorted(cores))


def cores_of(config: ModelConfig, policies: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the cores of each instance. If the instance's group names no policy, the cores are an empty tuple.

    Raises ``BadRepository`` if a group names a policy that no server option defines.
    """
    found = []
    for group in config.instance_group:
        name = group.host_policy
        cores = policies.get(name, ())
        if name and not cores:
            raise BadRepository(
                f"model '{config.name}' has the host policy '{name}', which is not known; start the server with "
                f"--host-policy {name},cpu-cores=0-3"
            )
        found += [cores] * max(1, group.count)
    return found


class PinnedSession:
    """A session that is opened and run only on the CPU cores ``cores``. The runtime's threads stay on ``cores``,
    because on Linux a new thread inherits the cores of the thread that starts it."""

    def __init__(self, opened: Callable[[], Session], cores: tuple[int, ...]) -> None:
        self._cores = frozenset(cores)
        with ThreadPoolExecutor(1) as pool:
            self._session = pool.submit(self._open, opened).result()

    def _open(self, opened: Callable[[], Session]) -> Session:
        try:
            os.sched_setaffinity(0, self._cores)
        except OSError:
            cores = ",".join(map(str, sorted(self._cores)))
            raise BadRepository(f"this process may not run on the cores {cores}; correct --host-policy") from None
        return opened()

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Runs the session in this thread, on the session's cores."""
        with self._pinned():
            return self._session.run(feeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
