"""Proves that the server of the container file runs without root, on a file system that it can't write to but in /tmp,
and that its health check tells whether it serves. No image is built: the commands, the user and the environment of the
file run here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accel.serve.transports.native import build
from tests.support import ROOT
from tests.support.serving import linear

# Makes all that the server sees read-only but the folder for temporary files, and goes on as the user.
PREPARE = """
import fcntl, json, os, socket, struct, subprocess, sys
given = json.loads(sys.argv[1])
with socket.socket() as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 1))  # the network of this process has its own addresses
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", given["scratch"]], check=True)
for line in open("/proc/self/mountinfo"):
    place = line.split()[4]
    if not place.startswith(("/proc", "/sys", "/dev", given["scratch"])):
        subprocess.run(["mount", "-o", "remount,bind,ro", place], capture_output=True)
words = ["unshare", "--user", f"--map-user={given['uid']}", f"--map-group={given['gid']}"]
os.execvp(words[0], [*words, sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
INSIDE = """
import errno, json, os, subprocess, sys, time
given = json.loads(sys.argv[1])
assert os.getuid() == int(given["uid"])
try:
    open(os.path.join(os.path.dirname(given["scratch"]), "new"), "w")
except OSError as error:
    assert error.errno == errno.EROFS
else:
    raise AssertionError("the file system can be written")
os.chdir(given["scratch"])
healthy = lambda: not subprocess.run(given["check"], stderr=subprocess.DEVNULL).returncode
assert not healthy()
server = subprocess.Popen(given["command"])
try:
    end = time.monotonic() + 60
    while not healthy():
        assert server.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    server.terminate()
    assert server.wait(60) == 0
    assert not healthy()
finally:
    server.kill()
"""


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the container file."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in whole.splitlines() if line.strip()]


def last_stage() -> dict[str, str]:
    """Returns the instructions that describe how the image runs."""
    found: dict[str, str] = {}
    for name, text in instructions():
        found = {} if name == "FROM" else {**found, name: text}
    return found


def test_the_file_is_sound() -> None:
    """Fails if the image runs as root, has a floating base, a shell between the signal and the server, or copies a file
    that isn't there."""
    stage = last_stage()
    uid, _, gid = stage["USER"].partition(":")
    assert int(uid) > 0 < int(gid)
    assert json.loads(stage["ENTRYPOINT"]) == ["accel", "serve"]
    assert json.loads(stage["CMD"])[0] == "/models"
    assert stage["HEALTHCHECK"].partition("CMD ")[2].startswith("[")
    bases = {text.split()[0] for name, text in instructions() if name == "FROM"}
    assert all(re.search(r":\d+\.\d+-\w+", base) for base in bases)
    for name, text in instructions():
        assert name != "ADD"
        if name == "RUN" and "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert "rm -rf /var/lib/apt/lists/*" in text
        if name == "COPY" and not text.startswith("--from"):
            assert all((ROOT / word).exists() for word in text.split()[:-1]), text


def test_the_server_runs_as_in_the_image(tmp_path: Path) -> None:
    """Fails if the server needs root or writes anywhere but in the folder for temporary files, if it doesn't take the
    native transport, or if the health check succeeds before or after the server, or fails while it serves."""
    if reason := build.why_not():
        pytest.skip(reason)
    linear(tmp_path / "models" / "linear" / "1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    stage = last_stage()
    environment = dict(word.partition("=")[::2] for word in shlex.split(stage["ENV"]))
    environment = {name: value.replace("/tmp", str(scratch)) for name, value in environment.items()}
    environment |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "ACCEL_PORT_LIBRARY": str(build.build()),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-m", *json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])]
    command[command.index("/models")] = str(tmp_path / "models")
    check = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    uid, _, gid = stage["USER"].partition(":")
    given = json.dumps({"scratch": str(scratch), "uid": uid, "gid": gid, "command": command, "check": check})
    apart = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "tmpfs", str(scratch)], capture_output=True).returncode:
        pytest.skip("this machine doesn't let a process have file systems of its own")
    words = [*apart, sys.executable, "-c", PREPARE, given, INSIDE]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"transport": "native"' in done.stderr
