"""Tokens and TLS."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from serving import Start
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from accel.errors import BadRepository
from accel.serve import proto
from accel.serve.access import bearer, read_tokens

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
    """The status of one method of the service, named by its name."""
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
    """Fails if one method of the protocol answers a caller without a token that the server knows."""
    assert call(process, name, token) is grpc.StatusCode.UNAUTHENTICATED


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
    """Fails if a token controls the server or reaches a model that it isn't for."""
    assert call(process, name, "r-secret", fields) is grpc.StatusCode.PERMISSION_DENIED


def test_what_a_token_is_for(process: Any) -> None:
    """Fails if a right token is refused, or sees models that it isn't for."""
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
    """Fails if the HTTP face leaves a door open; probes are to be open."""
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"holds no \[\[token\]\]"),
        ("[[token]]\nname = 'a'", "needs a name and either"),
        ("[[token]]\nname = 'a'\nsha256 = 'xyz'", "64 hex digits"),
        ("[[token]]\nname = 'a'\ntoken = ''", "isn't empty"),
        ("[[token]]\nname = 'a'\ntoken = 't'\ncontroll = true", "nothing else"),
        ("[[token", "can't read the tokens"),
    ],
)
def test_a_bad_file_of_tokens(tmp_path: Path, text: str, says: str) -> None:
    """Fails if a mistake in the file opens the server or isn't named."""
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(BadRepository, match=says):
        read_tokens(path)


def test_the_header() -> None:
    """Fails if something that is no bearer token is taken for one."""
    assert bearer("Bearer abc") == "abc"
    assert bearer("bearer  abc ") == "abc"
    assert bearer("Basic abc") is bearer("Bearer ") is bearer("abc") is bearer(None) is None


def certificate(folder: Path, name: str, issuer: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """A certificate for 127.0.0.1 in ``name.pem`` and ``name.key``; signed by itself where there is no issuer."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made, key


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


def test_tls(repository: Path, start: Start, pki: Path) -> None:
    """Fails if a client takes a certificate of another issuer, or a plain connection gets through."""
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


def test_mutual_tls(repository: Path, start: Start, pki: Path) -> None:
    """Fails if a client without a certificate, or with one that another issuer signed, gets through."""
    process = start(
        repository,
        tls_certificate=str(pki / "ca-server.pem"),
        tls_key=str(pki / "ca-server.key"),
        tls_client_ca=str(pki / "ca.pem"),
    )
    port = process.ports["grpc"]
    assert live(port, pki, "ca", "ca-client")
    assert not live(port, pki, "ca")
    assert not live(port, pki, "ca", "other-client")
