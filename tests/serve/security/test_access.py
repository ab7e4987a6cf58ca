"""Proves that tokens and TLS protect every method, route and model of the server."""

from __future__ import annotations

import hashlib
import re
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from accel.errors import BadRepository
from accel.serve.protocol import messages as proto
from accel.serve.security.access import bearer, read_tokens
from tests.support import ROOT
from tests.support.certificates import certificate
from tests.support.serving import Start, plain, routes

TOKENS = f"""
[[token]]
name = "reader"
sha256 = "{hashlib.sha256(b"r-secret").hexdigest()}"
models = ["lin*"]

[[token]]
name = "operator"
token = "o-secret"
control = true
"""


@pytest.fixture
def process(repository: Path, start: Start, tmp_path: Path) -> Any:
    (tmp_path / "tokens.toml").write_text(TOKENS)
    return start(repository, mode="explicit", models=("*",), tokens=str(tmp_path / "tokens.toml"), http_port=0)


def call(process: Any, name: str, token: str | None, fields: Any = None) -> grpc.StatusCode:
    """Calls the named method of the service and returns its status."""
    from tritonclient.grpc import service_pb2

    metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        method = getattr(GRPCInferenceServiceStub(channel), name)
        kind = "ModelInferRequest" if name == "ModelStreamInfer" else f"{name}Request"
        request = getattr(service_pb2, kind)(**(fields or {}))
        try:
            if name == "ModelStreamInfer":
                list(method(iter([request]), metadata=metadata))
            else:
                method(request, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.mark.parametrize("name", sorted(proto.methods()))
@pytest.mark.parametrize("token", [None, "wrong", "", "r-secret "[:-2]])
def test_every_method_wants_a_token(process: Any, name: str, token: str | None) -> None:
    """Fails if a gRPC method of the protocol answers a caller without a valid token."""
    assert call(process, name, token) is grpc.StatusCode.UNAUTHENTICATED


def services(process: Any, token: str | None) -> set[str] | grpc.StatusCode:
    """Returns the services that reflection lists, or the status of the failed call."""
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        try:
            (listed,) = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code()
        return {service.name for service in listed.list_services_response.service}


def test_what_is_beside_the_protocol(process: Any) -> None:
    """Fails if reflection answers a caller without a valid token. Also fails if reflection lists a service that the
    tests in this file don't cover."""
    reflection = "grpc.reflection.v1alpha.ServerReflection"
    for token in (None, "wrong", ""):
        assert services(process, token) is grpc.StatusCode.UNAUTHENTICATED
    assert services(process, "r-secret") == {proto.SERVICE, "grpc.health.v1.Health", reflection}


def test_probes_need_no_token(process: Any) -> None:
    """Fails if a grpc.health.v1 probe without a token is refused, or reveals anything about a model. Kubernetes sends
    these probes without a token."""
    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", proto.SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=60).status == serving
            watched = stub.Watch(request, timeout=60)
            assert next(watched).status == serving
            watched.cancel()
        for model in ("linear", "pair"):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(service=model), timeout=60)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("RepositoryModelLoad", {"model_name": "linear"}),
        ("RepositoryModelUnload", {"model_name": "linear"}),
        ("SystemSharedMemoryRegister", {"name": "r", "key": "/x", "byte_size": 1}),
        ("SystemSharedMemoryUnregister", {"name": "r"}),
        ("CudaSharedMemoryRegister", {"name": "r"}),
        ("ModelMetadata", {"name": "pair"}),
        ("ModelInfer", {"model_name": "pair"}),
        ("ModelStatistics", {"name": "pair"}),
        ("ModelConfig", {"name": "pair"}),
        ("ModelReady", {"name": "pair"}),
    ],
)
def test_what_a_token_is_not_for(process: Any, name: str, fields: Any) -> None:
    """Fails if a token without the control right can control the server, or if a token reaches a model outside the
    token's list."""
    assert call(process, name, "r-secret", fields) is grpc.StatusCode.PERMISSION_DENIED


def test_what_a_token_is_for(process: Any) -> None:
    """Fails if a valid token is refused, or sees models outside the token's list."""
    headers = {"authorization": "Bearer r-secret"}
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        assert client.infer("linear", [given], headers=headers).as_numpy("y").shape == (1, 3)
        assert [m.name for m in client.get_model_repository_index(headers=headers).models] == ["linear"]
        assert [m.name for m in client.get_inference_statistics(headers=headers).model_stats] == ["linear"]
        operator = {"authorization": "Bearer o-secret"}
        client.unload_model("pair", headers=operator)
        assert not client.is_model_ready("pair", headers=operator)


def test_http_wants_it_too(process: Any) -> None:
    """Fails if an HTTP request other than a probe is answered without a token."""
    with triton_http.InferenceServerClient(f"127.0.0.1:{process.ports['http']}") as client:
        assert client.is_server_ready()
        for refused in (
            client.get_server_metadata,
            client.get_model_repository_index,
            client.get_inference_statistics,
            lambda: client.load_model("linear"),
            lambda: client.get_model_metadata("linear"),
            lambda: client.get_model_metadata("linear", headers={"authorization": "Bearer wrong"}),
        ):
            with pytest.raises(InferenceServerException) as caught:
                refused()
            assert caught.value.status() == "401"
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("linear", headers={"authorization": "Bearer r-secret"})
        assert caught.value.status() == "403"


OPEN = {("GET", "/"), ("GET", "/v2/health/live"), ("GET", "/v2/health/ready")}
# These requests ask about the whole server. Requests about the whole server need no control right, but their answers
# list only the models that the token may use.
READ = {
    ("GET", path)
    for path in (
        "/live.json", "/metrics", "/v2", "/v2/models/stats", "/v2/logging", "/v2/trace/setting",
        "/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status",
        "/v2/systemsharedmemory/region/{region}/status", "/v2/cudasharedmemory/region/{region}/status",
    )
} | {("POST", "/v2/repository/index")}  # fmt: skip


BODIES = {
    "register": b'{"key": "/accel", "byte_size": 1}', "logging": b'{"log_verbose_level": 1}',
    "setting": b'{"trace_rate": "5"}',
}  # fmt: skip


def status(process: Any, method: str, path: str, token: str | None, model: str) -> int:
    for name, value in (("{model}", model), ("{version}", "1"), ("{region}", "nothing")):
        path = path.replace(name, value)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = BODIES.get(path.rpartition("/")[2], b"{}")
    return plain(process, path, body if method == "POST" else None, **headers)[0]


def test_the_page_says_which_routes_need_control(process: Any) -> None:
    """Checks that docs/how-to/serving.md marks exactly the routes that need the control right."""
    page = (ROOT / "docs" / "how-to" / "serving.md").read_text(encoding="utf-8")
    for method, path, answer in re.findall(r"^\| (GET|POST) \| `([^`]+)` \| (.+) \|$", page, re.MULTILINE):
        short = re.sub(r"\[.*?\]", "", path)
        assert (status(process, method, short, "r-secret", "linear") == 403) == answer.endswith("(control)"), path


@pytest.mark.parametrize("token", [None, "wrong", ""])
def test_every_route_wants_a_token(process: Any, token: str | None) -> None:
    """Fails if any HTTP path, including future paths, answers a caller without a valid token."""
    table = routes()
    assert len(table) > 30
    assert table >= OPEN | READ
    found = {route: status(process, *route, token, "linear") for route in table}
    assert {route for route, code in found.items() if code != 401} == OPEN
    assert {found[route] for route in OPEN} == {200}
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for method, path in table:
        if method == "POST":  # the server sends 401 before it reads the body
            assert plain(process, re.sub("{.*?}", "1", path), b"[", **headers)[0] == 401, path


def test_what_a_token_is_not_for_over_http(process: Any) -> None:
    """Fails if a token without the control right can control the server over HTTP, or reaches a model outside the
    token's list."""
    table = routes()
    found = {route: status(process, *route, "r-secret", "pair") for route in table - OPEN}
    assert {route for route, code in found.items() if code != 403} == READ
    assert status(process, "POST", "/v2/repository/models/{model}/unload", "r-secret", "linear") == 403
    assert status(process, "GET", "/v2/models/{model}/config", "r-secret", "linear") == 200
    assert status(process, "GET", "/v2/models/{model}/config", "o-secret", "pair") == 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"has no \[\[token\]\] table"),
        ("[[token]]\nname = 'a'", "needs a name and either"),
        ("[[token]]\nname = 'a'\nsha256 = 'xyz'", "64 hex digits"),
        ("[[token]]\nname = 'a'\ntoken = ''", "non-empty string"),
        ("[[token]]\nname = 'a'\ntoken = 't'\ncontroll = true", "may only have"),
        ("[[token", "can't read the tokens"),
    ],
)
def test_a_bad_file_of_tokens(tmp_path: Path, text: str, says: str) -> None:
    """Checks that a mistake in the token file doesn't open the server to everybody, and that the error names the
    mistake."""
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(BadRepository, match=says):
        read_tokens(path)


def test_the_header() -> None:
    """Fails if a header value without a bearer token is read as a token."""
    assert bearer("Bearer abc") == "abc"
    assert bearer("bearer  abc ") == "abc"
    assert bearer("Basic abc") is bearer("Bearer ") is bearer("abc") is bearer(None) is None


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    for name in ("ca", "other"):
        issuer = certificate(tmp_path, name)
        certificate(tmp_path, f"{name}-server", issuer)
        certificate(tmp_path, f"{name}-client", issuer)
    return tmp_path


def live(port: int, pki: Path, root: str, client: str | None = None) -> bool:
    options: dict[str, Any] = {"ssl": True, "root_certificates": str(pki / f"{root}.pem")}
    if client:
        options |= {"private_key": str(pki / f"{client}.key"), "certificate_chain": str(pki / f"{client}.pem")}
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{port}", **options) as made:
            return made.is_server_live(client_timeout=30)
    except InferenceServerException:
        return False


def live_over_https(port: int, pki: Path, root: str, client: str | None = None) -> bool:
    context = ssl.create_default_context(cafile=str(pki / f"{root}.pem"))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # these certificates have only the required fields
    if client:
        context.load_cert_chain(pki / f"{client}.pem", pki / f"{client}.key")
    try:
        address = f"https://127.0.0.1:{port}/v2/health/live"
        with urllib.request.urlopen(address, context=context, timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_tls(repository: Path, start: Start, pki: Path) -> None:
    """Fails if a client accepts a certificate of another issuer, or if the server accepts a plain connection."""
    tls = {"tls_certificate": str(pki / "ca-server.pem"), "tls_key": str(pki / "ca-server.key")}
    process = start(repository, http_port=0, **tls)
    port = process.ports["grpc"]
    assert live(port, pki, "ca")
    assert not live(port, pki, "other")
    with (
        triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
        pytest.raises(InferenceServerException),
    ):
        client.is_server_live(client_timeout=5)
    assert live_over_https(process.ports["http"], pki, "ca")
    assert not live_over_https(process.ports["http"], pki, "other")
    with pytest.raises(OSError):
        plain(process, "/v2/health/live")


def test_mutual_tls(repository: Path, start: Start, pki: Path, cli: Any) -> None:
    """Fails if a client without a certificate, or with a certificate of another issuer, gets an answer over gRPC or
    HTTP. Also checks that ``accel infer`` can send a client certificate."""
    process = start(
        repository,
        http_port=0,
        tls_certificate=str(pki / "ca-server.pem"),
        tls_key=str(pki / "ca-server.key"),
        tls_client_ca=str(pki / "ca.pem"),
    )
    for face, ask in (("grpc", live), ("http", live_over_https)):
        port = process.ports[face]
        assert ask(port, pki, "ca", "ca-client")
        assert not ask(port, pki, "ca")
        assert not ask(port, pki, "ca", "other-client")
    np.savez(pki / "x.npz", x=np.ones((1, 4), np.float32))
    words = ["infer", "linear", "--url", f"127.0.0.1:{process.ports['grpc']}", "--input", pki / "x.npz", "-q"]
    words += ["--tls-ca", pki / "ca.pem", "--timeout", "60"]
    shown = ["--tls-certificate", pki / "ca-client.pem", "--tls-key", pki / "ca-client.key"]
    assert cli(*words, *shown).code == 0
    assert cli(*words).code == 1
    for lacking in (shown[:2], shown[2:]):
        ran = cli(*words, *lacking)
        assert ran.code == 2
        assert "needs --tls-certificate, --tls-key and --tls-ca" in ran.stderr
    ran = cli(*words, *shown[:3], pki / "nothing.key")
    assert ran.code == 2
    assert "check --tls-key" in ran.stderr
