"""Certificates: what is refused before it is used, and how changed files are taken up."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from engine_core.types.errors import ConfigError
from services.runtime.tls import HttpTls, MeshTls, client_context, hint, pinned_context, shake_hands
from tests.support.certificates import Authority, Files


def mesh(files: Files) -> MeshTls:
    return MeshTls(files.cert, files.key, files.ca)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Files:
    made = Files(tmp_path)
    made.certify(authority)
    return made


def test_what_every_peer_would_refuse_is_refused_at_the_start(files: Files, authority: Authority) -> None:
    assert mesh(files).generation == 1
    files.certify(authority, expired=True)
    with pytest.raises(ConfigError, match="does not hold against --tls-ca .*certificate has expired") as caught:
        mesh(files)
    assert caught.value.field == "--tls-cert" and str(files.cert) in caught.value.message
    files.certify(Authority(), trusted=authority.pem)
    with pytest.raises(ConfigError, match="unable to get local issuer certificate"):
        mesh(files)
    files.certify(authority)
    files.write(files.key, authority.issue()[1])
    with pytest.raises(ConfigError, match=r"no certificate with its unencrypted key: .*MISMATCH"):
        mesh(files)
    files.certify(authority)
    files.write(files.ca, "no certificate at all")
    with pytest.raises(ConfigError, match="--tls-ca .* holds no certificates"):
        mesh(files)
    for path, option in ((files.ca, "--tls-ca"), (files.key, "--tls-key"), (files.cert, "--tls-cert")):
        path.unlink()
        with pytest.raises(ConfigError, match=f"{option} {path} can't be read: No such file"):
            mesh(files)


def test_changed_files_are_taken_whole_or_not_at_all(
    files: Files, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = mesh(files)
    assert not tls.refresh()
    files.write(files.key, authority.issue()[1])  # the certificate that fits it is not there yet
    assert not tls.refresh() and tls.generation == 1
    files.certify(authority)
    assert tls.refresh() and tls.generation == 2
    files.certify(authority, expired=True)
    assert not tls.refresh() and not tls.refresh() and tls.generation == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "MISMATCH" in told[0].upper() and "certificate has expired" in told[1]


def test_an_http_context_is_given_new_certificates(tmp_path: Path, authority: Authority) -> None:
    files = Files(tmp_path)
    files.certify(authority)
    tls = HttpTls(files.cert, files.key)
    client = ssl.create_default_context(cadata=authority.pem.decode())
    client.check_hostname = False
    shake_hands(tls.context, client)
    other = Authority()
    files.certify(other)
    assert tls.refresh() and not tls.refresh()
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tls.context, client)
    client.load_verify_locations(cadata=other.pem.decode())
    shake_hands(tls.context, client)
    files.write(files.cert, b"half a cert")
    assert not tls.refresh()
    shake_hands(tls.context, client)


def test_https_needs_both_files(files: Files) -> None:
    assert HttpTls.of("", "") is None
    assert HttpTls.of(str(files.cert), str(files.key)) is not None
    with pytest.raises(ConfigError, match="there is no --http-tls-key") as caught:
        HttpTls.of(str(files.cert), "")
    assert caught.value.field == "http_tls_key"
    with pytest.raises(ConfigError, match="there is no --http-tls-cert"):
        HttpTls.of("", str(files.key))


def test_clients_believe_who_they_are_told_to(tmp_path: Path, authority: Authority) -> None:
    mine, theirs = Files(tmp_path / "a"), Files(tmp_path / "b")
    mine.certify(authority, "somewhere.else")
    theirs.certify(authority, "somewhere.else")
    server = HttpTls(mine.cert, mine.key).context
    shake_hands(server, pinned_context(str(mine.cert)))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, pinned_context(str(theirs.cert)))
    believing = client_context(str(mine.ca))
    believing.check_hostname = False
    shake_hands(server, believing)
    with pytest.raises(ConfigError, match="--http-ca .* holds no certificates"):
        client_context(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE)", "of both ends"),
        ("SSL_ERROR_SSL: error:1000007d: CERTIFICATE_VERIFY_FAILED: certificate has expired", "of both ends"),
        ("verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed.", "--tls-name"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "hung up"),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused", ""),
        ("Socket closed", ""),
    ],
)
def test_only_failures_of_tls_get_advice(message: str, advice: str) -> None:
    assert advice in hint(message) and bool(hint(message)) == bool(advice)
