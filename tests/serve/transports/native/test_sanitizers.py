"""Runs the tests of the native transport with an extension that finds wrong uses of memory and of numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.serve.transports.native import build

FILES = ("test_calls.py", "test_port.py", "test_floods.py", "test_hostile.py", "test_wrong_frames.py")


def run_sanitized(*words: str, **environment: str) -> str:
    """Runs pytest with a sanitized extension, and returns what it printed. Asserts that all tests pass."""
    if reason := build.why_not():
        pytest.skip(reason)
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        asked = ["gcc", f"-print-file-name={name}"]
        found.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    given = {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees little at its end
        "ACCEL_PORT_LIBRARY": str(build.build(sanitize="address,undefined")),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.proof
def test_the_tests_of_the_transport() -> None:
    """Fails if the extension reads or writes outside of its memory, uses freed memory or overflows a number, in any
    other test of this folder."""
    run_sanitized("-k", "not without_the_library", *(str(Path(__file__).with_name(name)) for name in FILES))


@pytest.mark.nightly
def test_a_long_campaign_of_hostile_clients() -> None:
    """Fails as the test above, for connections that are other ones each time."""
    file = str(Path(__file__).with_name("test_hostile.py"))
    print(run_sanitized("-m", "nightly", "--timeout", "7200", file))
