"""Proves that the command ``accel serve`` handles processes, signals, crashes and ``--check`` correctly."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.cli.infer import command as infer_command
from accel.cli.serve import command as serve_command
from accel.serve.deploy.manifests import Deployment
from accel.serve.process.options import ServeOptions
from tests.support.serving import FAULTY, WEIGHTS, Load, ask, client, linear, pids


def test_sigterm_under_load(repository: Path, serve: Any) -> None:
    """Checks that a server under constant load ends cleanly, and that clients get no error other than UNAVAILABLE."""
    served = serve(str(repository), "--drain", "20")
    load = Load(served.wait_for("serving")["ports"]["grpc"])
    load.more(50)
    assert served.end() == 0
    load.end()
    stopped = [line["message"] for line in served.log]
    assert "stopped before every request was answered" not in stopped
    # A request that arrives while the server is ending, or after it has ended, gets UNAVAILABLE.
    assert {status for status, _ in load.errors} <= {"StatusCode.UNAVAILABLE"}


def test_bytes_that_are_not_http(repository: Path, serve: Any) -> None:
    """Fails if a client can fill the log with tracebacks by sending HTTP/2 or random bytes to the HTTP port."""
    served = serve(str(repository))
    port = served.wait_for("serving")["ports"]["http"]
    for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(27), b"\x00\xff\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as made:
            made.settimeout(60)
            made.sendall(sent)
            made.recv(1 << 16)
    assert served.end() == 0
    served.wait_for("end of log")
    lines = [line for line in served.log if "reason" in line]
    assert {line["level"] for line in lines} == {"info"}
    assert not any("exception" in line or line["message"].startswith("Traceback") for line in served.log)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_while_requests_run(tmp_path: Path, serve: Any, processes: str) -> None:
    """Fails if a request is lost or gets an error although the server accepted the request before SIGTERM."""
    count = 4
    linear(tmp_path / "bad" / "1")
    config = f"max_batch_size: 1 instance_group [{{ count: {count} }}]"  # each request is a run
    (tmp_path / "bad" / "config.pbtxt").write_text(config)
    served = serve(str(tmp_path), "--processes", processes, "--drain", "60", path=FAULTY)
    port = served.wait_for("all processes serve" if processes == "2" else "serving")["ports"]["grpc"]
    with ThreadPoolExecutor(count) as pool, ExitStack() as stack:
        clients = [stack.enter_context(client(port)) for _ in range(count)]
        asked = [pool.submit(ask, made, "bad", 5.0, client_timeout=100) for made in clients]
        served.wait_for("takes its time\n", count)
        assert served.end() == 0
        for one in asked:
            np.testing.assert_allclose(one.result(100), [5 * WEIGHTS.sum(0)], rtol=1e-5)


@pytest.fixture
def two(repository: Path, serve: Any) -> Any:
    served = serve(str(repository), "--processes", "2", "--mode", "explicit", "--load-model", "*")
    served.ready = served.wait_for("all processes serve")
    served.grpc = served.ready["ports"]["grpc"]
    return served


def test_a_killed_process(two: Any) -> None:
    """Fails if killing a process makes requests of another process fail, leaves a client waiting, or starts no new
    process."""
    load = Load(two.grpc)
    load.more(50)
    os.kill(pids(two)[0], signal.SIGKILL)
    assert two.wait_for("a process died and is started again")["died"] == "signal SIGKILL"
    two.wait_for("serving", 3)
    load.more(50)
    load.end()
    assert len(load.lost) <= 4 * 2, load.lost  # each of four clients may lose a running and a waiting request
    assert {status for status, _ in load.errors} <= {"StatusCode.UNAVAILABLE"}
    assert two.process.poll() is None


def owner(port: int, among: list[int]) -> int | None:
    """Returns the process in ``among`` that is connected to the client's ``port``. Returns None if no process is
    connected to ``port``."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) == port}
    for pid in among:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(file.readlink()) in ends:
                    return pid
    return None


def test_only_the_requests_of_a_dead_process_fail(tmp_path: Path, serve: Any) -> None:
    """Fails if killing a process makes a request of another process fail. Also fails if a request of the killed process
    hangs or gets an answer."""
    linear(tmp_path / "bad" / "1")
    config = "max_batch_size: 1 instance_group [{ count: 2 }]"  # each request is a run
    (tmp_path / "bad" / "config.pbtxt").write_text(config)
    served = serve(str(tmp_path), "--processes", "2", path=FAULTY)
    port = served.wait_for("all processes serve")["ports"]["http"]
    dead, alive = pids(served)
    held: dict[int, list[HTTPConnection]] = {dead: [], alive: []}
    with ExitStack() as stack:
        for _ in range(200):  # the operating system chooses the process for each connection
            made = stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=100)))
            made.request("GET", "/v2/health/live")
            assert json.loads(made.getresponse().read()) == {"live": True}
            found = held[owner(made.sock.getsockname()[1], [dead, alive]) or 0]
            if len(found) < 2:
                found.append(made)
            if all(len(some) == 2 for some in held.values()):
                break
        for pid, mark in ((dead, 2), (alive, 5)):
            for made in held[pid]:
                x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [mark] * 4}
                made.request("POST", "/v2/models/bad/infer", json.dumps({"inputs": [x]}))
        served.wait_for("hangs\n", 2)
        served.wait_for("takes its time\n", 2)
        os.kill(dead, signal.SIGKILL)
        for made in held[dead]:
            with pytest.raises(ConnectionError):
                made.getresponse()
        for made in held[alive]:
            answer = json.load(made.getresponse())
            np.testing.assert_allclose(answer["outputs"][0]["data"], 5 * WEIGHTS.sum(0), rtol=1e-5)


def test_a_restart_that_fails(repository: Path, serve: Any, tmp_path: Path) -> None:
    """Checks that a failed restart of a process doesn't affect other processes, and that the server retries until the
    restart works."""
    tokens = tmp_path / "tokens.toml"
    text = '[[token]]\nname = "a"\ntoken = "secret"\n'
    tokens.write_text(text)
    served = serve(str(repository), "--processes", "2", "--tokens", str(tokens))
    port = served.wait_for("all processes serve")["ports"]["grpc"]
    tokens.unlink()
    os.kill(pids(served)[0], signal.SIGKILL)
    died = "a process died and is started again"
    assert served.wait_for(died)["died"] == "signal SIGKILL"
    for count in (2, 3):  # the server retries until the restart works
        assert "tokens.toml" in served.wait_for(died, count)["reason"]
    for _ in range(4):
        with client(port) as made:
            ask(made, headers={"authorization": "Bearer secret"})
    tokens.write_text(text)
    served.wait_for("serving", 3)
    assert served.end() == 0


def test_processes_that_never_serve(repository: Path, serve: Any, tmp_path: Path) -> None:
    """Checks that a server whose processes can't start stops retrying and logs the reason."""
    (tmp_path / "tokens.toml").write_text("[[token")
    served = serve(str(repository), "--processes", "2", "--tokens", str(tmp_path / "tokens.toml"))
    assert served.process.wait(60) == 2
    served.wait_for("end of log")
    assert any("can't read the tokens" in line["message"] for line in served.log), served.log


def test_commands_reach_every_process(two: Any, repository: Path) -> None:
    """Fails if a command or a counter covers only a single process, or misses a process that started later."""
    clients = [client(two.grpc) for _ in range(8)]  # the system distributes the connections over the processes
    linear(repository / "later" / "1")
    clients[0].load_model("later")
    clients[1].unload_model("pair")
    for made in clients:
        assert made.is_model_ready("later")
        assert not made.is_model_ready("pair")
        for _ in range(5):
            ask(made)
    for made in clients:
        stats = made.get_inference_statistics("linear").model_stats[0]
        assert stats.inference_stats.success.count == 40
    os.kill(pids(two)[1], signal.SIGKILL)
    two.wait_for("serving", 3)
    for _ in range(8):
        with client(two.grpc) as made:
            assert made.is_model_ready("later")
            assert not made.is_model_ready("pair")
    for made in clients:
        made.close()


def test_two_servers_on_one_port(two: Any, repository: Path, cli: Any) -> None:
    """Fails if a second server on the same port silently receives some of the first server's connections."""
    for processes in ("1", "2"):
        ran = subprocess.run(
            [
                sys.executable, "-m", "accel", "serve", str(repository), "--processes", processes,
                "--grpc-port", str(two.grpc), "--no-http",
            ],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert ran.returncode == 2
        assert "choose another port with --grpc-port" in ran.stderr


def test_a_port_that_was_left_a_moment_ago(repository: Path, serve: Any) -> None:
    """Checks that a server of several processes can start on a port with connections in TIME_WAIT. TIME_WAIT lasts for
    a minute after a connection is closed."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            taken, _ = before.accept()
            taken.close()  # the side that closes the connection first enters TIME_WAIT
            assert client.recv(1) == b""
    served = serve(str(repository), "--processes", "2", "--grpc-port", "0", "--http-port", str(port), free=False)
    assert served.wait_for("all processes serve")["ports"]["http"] == port


def test_idle_connections_do_not_hold_up_the_end(repository: Path, start: Any) -> None:
    """Fails if an ending server waits for a client with an idle connection."""
    process = start(repository, http_port=0)
    with closing(HTTPConnection("127.0.0.1", process.ports["http"], timeout=10)) as idle:
        idle.request("GET", "/v2/health/live")
        assert idle.getresponse().read()
        begun = time.monotonic()
        process.stop()
        assert time.monotonic() - begun < 3


def cores_of(pid: int) -> set[frozenset[int]]:
    """Returns the cores on which the process's threads may run."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # the thread may have ended
            found.add(frozenset(os.sched_getaffinity(int(task.name))))
    return found


def test_each_process_has_its_cores(two: Any) -> None:
    """Fails if a process, or a thread of its runtime, may run on another process's cores, or if a core is left without
    a process."""
    own = sorted(os.sched_getaffinity(0))
    half = len(own) // 2
    wanted = [frozenset(own[:half] or own), frozenset(own[half:])]  # with one core, the first process isn't pinned
    with client(two.grpc) as made:
        ask(made)
    assert [cores_of(pid) for pid in two.ready["processes"]] == [{cores} for cores in wanted]


MALLOPT = """
import ctypes, sys
from accel.serve.process.options import ServeOptions
from accel.serve.process.serving import ServingProcess

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc.mallinfo2.restype = Mallinfo2

def mapped():
    before = libc.mallinfo2().hblks
    libc.malloc(31 << 20)
    return libc.mallinfo2().hblks - before

process = ServingProcess(ServeOptions(repository=sys.argv[1], grpc_port=0, http_port=None))
before = mapped()
process.start()
print(before, mapped())
process.stop()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc, or one before 2.33")
def test_large_tensors_stay_in_the_heap(repository: Path) -> None:
    """Fails if a serving process calls mmap for each large tensor. The test allocates a block of 31 MiB before and
    after a server starts. Before the server starts, malloc uses mmap for this block. After the server starts, malloc
    must use the heap instead."""
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", MALLOPT, str(repository)],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ran.stdout.split() == ["1", "0"], ran.stdout + ran.stderr


def test_default_ports() -> None:
    """Checks that Triton's client with its default ports, and ``accel infer`` with its default port, can reach the
    server."""
    serve_ports = {option.name: option.default for option in serve_command.params if option.name.endswith("_port")}
    options = ServeOptions(repository="models")
    manifest = Deployment(name="models", image="accel")
    assert serve_ports == {"grpc_port": 8001, "http_port": 8000}
    assert {(o.grpc_port, o.http_port) for o in (options, manifest)} == {(8001, 8000)}
    [url] = [option.default for option in infer_command.params if option.name == "url"]
    assert url == "127.0.0.1:8001"


def test_check(repository: Path, cli: Any) -> None:
    """Fails if --check accepts a repository with a broken model, or rejects a good repository."""
    ran = cli("serve", repository, "--check", "--json")
    assert ran.code == 0, ran.stderr
    assert {m["name"]: m["state"] for m in json.loads(ran.stdout)["models"]} == {"linear": "READY", "pair": "READY"}
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"")
    ran = cli("serve", repository, "--check", "--json")
    assert ran.code == 1
    found = {m["name"]: m for m in json.loads(ran.stdout)["models"]}
    assert "is empty" in found["broken"]["reason"]
    assert found["linear"]["state"] == "READY"
    assert cli("serve", repository / "nowhere", "--check").code == 2
    (repository / "empty").mkdir()
    ran = cli("serve", repository / "empty", "--check")
    assert ran.code == 1
    assert "has no models" in ran.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model-repository", "models"], "accel serve FOLDER"),
        (["--model-repository=models"], "accel serve FOLDER"),
        (["models", "--model-control-mode", "explicit"], "--mode none, poll or explicit"),
        (["models", "--load-model", "linear"], "--load-model is for --mode explicit"),
    ],
)
def test_options_of_triton(cli: Any, words: list[str], says: str) -> None:
    """Checks that the error for a command-line option of Triton names the matching option of accel. Also fails if
    --load-model is accepted without --mode explicit."""
    ran = cli("serve", *words)
    assert ran.code == 2
    assert says in ran.stderr


def test_every_line_of_the_log_is_json(repository: Path, serve: Any) -> None:
    """Fails if a client that doesn't speak HTTP causes a bare traceback between the JSON lines of the log."""
    served = serve(str(repository))
    ports = served.wait_for("serving")["ports"]
    with socket.create_connection(("127.0.0.1", ports["http"]), timeout=10) as other:
        other.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40))
        while other.recv(4096):
            pass
    served.end()
    served.wait_for("end of log")
    assert [line for line in served.log[:-1] if "level" not in line] == []


def test_whole_numbers_in_json(repository: Path, start: Any, cli: Any, tmp_path: Path) -> None:
    """Fails if ``accel infer`` rejects the integer 1 in a JSON file for a float input, or accepts a number that no
    float can represent."""
    url = f"127.0.0.1:{start(repository).ports['grpc']}"
    for last, code in ((4, 0), ((1 << 53) + 1, 2)):
        (tmp_path / "x.json").write_text(json.dumps({"x": [[1, 2, 3, last]]}))
        ran = cli("infer", "linear", "--url", url, "--input", tmp_path / "x.json", "--json", "-q")
        assert ran.code == code, ran.stderr
        if code == 0:
            np.testing.assert_allclose(
                json.loads(ran.stdout)["outputs"]["y"]["data"], [1, 2, 3, 4] @ WEIGHTS, rtol=1e-5
            )
        else:
            assert "numbers that FP32 can't represent" in ran.stderr


def test_infer_command(repository: Path, start: Any, cli: Any, tmp_path: Path) -> None:
    """Fails if ``accel infer`` prints wrong outputs, or prints an error as a traceback."""
    process = start(repository)
    url = f"127.0.0.1:{process.ports['grpc']}"
    x = np.random.default_rng(0).standard_normal((20, 4))  # 20 float64 rows need more than one batch
    np.savez(tmp_path / "inputs.npz", x=x)
    ran = cli(
        "infer", "linear", "--url", url, "--input", tmp_path / "inputs.npz", "--json", "-o", tmp_path / "y.npz", "-q"
    )
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["requests"] == 3
    found = np.array(body["outputs"]["y"]["data"]).reshape(body["outputs"]["y"]["shape"])
    np.testing.assert_allclose(found, x @ WEIGHTS, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], x @ WEIGHTS, rtol=1e-4, atol=1e-5)
    assert "FP32" in cli("infer", "linear", "--url", url, "--input", tmp_path / "inputs.npz", "-q").stdout
    ran = cli("infer", "linear", "--url", "localhost", "--input", tmp_path / "inputs.npz", "-q")
    assert "localhost has no port; give HOST:PORT" in ran.stderr
    ran = cli("infer", "nothing", "--url", url, "--input", tmp_path / "inputs.npz", "-q")
    assert ran.code == 1
    assert "unknown model: 'nothing'" in ran.stderr
    np.savez(tmp_path / "wrong.npz", z=x)
    ran = cli("infer", "linear", "--url", url, "--input", tmp_path / "wrong.npz", "-q")
    assert ran.code == 2
    assert "the model takes the inputs x, but the data has z" in ran.stderr
    ran = cli("infer", "linear", "--url", "127.0.0.1:1", "--input", tmp_path / "inputs.npz", "-q", "--timeout", "5")
    assert ran.code == 1
    assert "start one with accel serve" in ran.stderr
