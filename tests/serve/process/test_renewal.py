"""Proves that the running server adopts replaced tokens, certificates and configs."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tritonclient.utils import InferenceServerException

from accel.serve.models.repository import Repository
from tests.support.serving import Start, linear


def tokens(path: Path, secret: str) -> None:
    path.write_text(f'[[token]]\nname = "own"\ntoken = "{secret}"\n')


def test_tokens(repository: Path, start: Start, tmp_path: Path) -> None:
    """Checks that a removed token stops working, that a new token works, and that a broken token file changes
    nothing."""
    path = tmp_path / "tokens.toml"
    tokens(path, "first")
    process = start(repository, tokens=str(path))
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:

        def knows(secret: str) -> bool:
            process.renewal.look()
            try:
                return bool(client.is_server_live(headers={"authorization": f"Bearer {secret}"}, client_timeout=60))
            except InferenceServerException as error:
                if error.status() != "StatusCode.UNAUTHENTICATED":
                    raise
                return False

        assert (knows("first"), knows("second")) == (True, False)
        tokens(path, "second secret")
        assert (knows("first"), knows("second secret")) == (False, True)
        path.write_text("[[token")
        assert (knows("first"), knows("second secret")) == (False, True)
        path.unlink()
        assert knows("second secret")
        tokens(path, "the third")
        assert knows("the third")


def certificate(path: Path, name: str) -> bytes:
    """Writes ``server.pem`` and ``server.key``, self-signed for 127.0.0.1. Returns the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (path / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    body = made.public_bytes(serialization.Encoding.PEM)
    (path / "server.pem").write_bytes(body)
    return body


def trusted(ports: Any, root: bytes) -> tuple[bool, bool]:
    """Opens a gRPC and an HTTP connection. For each connection, returns True if the certificate ``root`` verifies the
    server's certificate."""
    with grpc.secure_channel(f"127.0.0.1:{ports['grpc']}", grpc.ssl_channel_credentials(root)) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
            over_grpc = True
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            over_grpc = False
    context = ssl.create_default_context(cadata=root.decode())
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{ports['http']}/v2/health/live", timeout=60, context=context):
            over_http = True
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise
        over_http = False
    return over_grpc, over_http


def test_certificates(repository: Path, start: Start, tmp_path: Path) -> None:
    """Checks that new connections show the new certificate, and that an unusable certificate doesn't turn TLS off."""
    first = certificate(tmp_path, "first")
    tls = {"tls_certificate": str(tmp_path / "server.pem"), "tls_key": str(tmp_path / "server.key")}
    process = start(repository, http_port=0, **tls)
    assert trusted(process.ports, first) == (True, True)
    second = certificate(tmp_path, "second")
    process.renewal.look()
    assert trusted(process.ports, second) == (True, True)
    assert trusted(process.ports, first) == (False, False)
    (tmp_path / "server.pem").write_bytes(first)  # this key belongs to the second certificate
    process.renewal.look()
    assert trusted(process.ports, second) == (True, True)
    (tmp_path / "server.key").unlink()
    process.renewal.look()
    assert trusted(process.ports, second) == (True, True)


@pytest.mark.parametrize("file", ["config.pbtxt", "labels.txt"])
def test_a_config_under_poll(tmp_path: Path, file: str) -> None:
    """Fails if polling misses a changed config or label file of an unchanged model, or adopts a broken config."""
    linear(tmp_path / "linear" / "1")
    config = 'max_batch_size: %d output { name: "y" label_filename: "labels.txt" }'
    (tmp_path / "linear" / "config.pbtxt").write_text(config % 4)
    (tmp_path / "linear" / "labels.txt").write_text("a\nb\nc")
    repository = Repository(tmp_path, mode="poll", poll_seconds=3600)
    try:
        repository.start()
        before = repository.get("linear")
        repository.poll_once()
        assert repository.get("linear") is before, "nothing has changed"
        text = {"config.pbtxt": config % 16, "labels.txt": "one\ntwo\nthree"}[file]
        (tmp_path / "linear" / file).write_text(text)
        repository.poll_once()
        after = repository.get("linear")
        assert after.scheduling.max_batch_size == (16 if file == "config.pbtxt" else 4)
        assert after.outputs["y"].labels == (("a", "b", "c") if file == "config.pbtxt" else ("one", "two", "three"))
        (tmp_path / "linear" / "config.pbtxt").write_text("max_batch_size: many")
        repository.poll_once()
        assert repository.get("linear") is after
        assert "can't read the config linear/config.pbtxt" in repository.index()[-1].reason
    finally:
        repository.close(1.0)
