"""Certificates from PEM files: both ends of gRPC (mTLS), and the HTTP port. Changed files are taken up without a
restart, by handshakes from then on; connections that are up stay up.

New files are tried before they are taken: the key must fit the certificate, and for gRPC the certificate must hold
against the own authorities, at both ends of a handshake in memory. So what every peer would refuse, an expired
certificate say, is refused here, by name.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from engine_core.types.errors import ConfigError
from services.runtime.keyfiles import KeyFiles, read_key_file

CERT_OPTION, KEY_OPTION, CA_OPTION = "--tls-cert", "--tls-key", "--tls-ca"
OPTIONS = f"{CERT_OPTION}, {KEY_OPTION} and {CA_OPTION}"

_TROUBLE = re.compile(r"handshake failed|SSL_ERROR|CERTIFICATE_|TSI_", re.IGNORECASE)
_MISNAMED = re.compile(r"Hostname Verification", re.IGNORECASE)
_HUNG_UP = re.compile(r"failed to connect .*(Socket closed|Connection reset|End of TCP stream)", re.IGNORECASE)


class Credentials(NamedTuple):
    """PEM texts of one process."""

    cert: bytes
    key: bytes
    ca: bytes


class MeshTls:
    """mTLS of one process: its certificate, and the authorities whose certificates it believes.

    A peer's certificate must name the host that was dialled or, with `name`, that name instead.
    """

    def __init__(self, cert: Path, key: Path, ca: Path, name: str = "") -> None:
        """Raises ConfigError."""
        self._cert, self._key, self._ca, self._name = cert, key, ca, name
        self._files = KeyFiles("the TLS certificate", (cert, key, ca), self._load)

    @property
    def generation(self) -> int:
        """Counts the versions of the files."""
        return self._files.generation

    def refresh(self) -> bool:
        """Looks at the files; True when they changed."""
        return self._files.refresh()

    def server_credentials(self, begins: Callable[[], None]) -> grpc.ServerCredentials:
        """For a port; each handshake uses the files as they are by then, and asks for the caller's certificate.
        `begins` is called for each, by a thread of gRPC's."""
        offered = 0

        def current() -> Any:
            nonlocal offered
            begins()
            if offered == self.generation:
                return None  # as before
            offered = self.generation
            return self._configuration()

        return grpc.dynamic_ssl_server_credentials(self._configuration(), current, require_client_authentication=True)

    def channel(self, endpoint: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel with the certificate as it is now."""
        pem = self._files.value
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        named = [("grpc.ssl_target_name_override", self._name)] if self._name else []
        return grpc.aio.secure_channel(endpoint, credentials, options=[*options, *named])

    def _configuration(self) -> Any:
        pem = self._files.value
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)

    def _load(self) -> Credentials:
        pem = Credentials(
            read_key_file(self._cert, CERT_OPTION),
            read_key_file(self._key, KEY_OPTION),
            read_key_file(self._ca, CA_OPTION),
        )
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False  # what it is called is for those who dial it
        server.verify_mode = ssl.CERT_REQUIRED
        for context in (server, client):
            load_pair(context, self._cert, self._key, CERT_OPTION, KEY_OPTION)
            try:
                context.load_verify_locations(self._ca)
            except (OSError, ValueError) as exc:
                raise ConfigError(f"{CA_OPTION} {self._ca} holds no certificates: {exc}", field=CA_OPTION) from exc
        try:
            shake_hands(server, client)
        except ssl.SSLError as exc:
            why = getattr(exc, "verify_message", "") or exc.reason or str(exc)
            raise ConfigError(
                f"{CERT_OPTION} {self._cert} does not hold against {CA_OPTION} {self._ca}: {why}", field=CERT_OPTION
            ) from exc
        return pem


class HttpTls:
    """The certificate of an HTTP port. `context` serves for good; it is given new files as they come."""

    @classmethod
    def of(cls, cert: str, key: str) -> HttpTls | None:
        """None without files. Raises ConfigError, also for one file without the other."""
        if not cert and not key:
            return None
        if not cert or not key:
            raise ConfigError(
                f"HTTPS needs --http-tls-cert and --http-tls-key; there is no --http-tls-{'key' if cert else 'cert'}",
                field="http_tls_key" if cert else "http_tls_cert",
            )
        return cls(Path(cert), Path(key))

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises ConfigError."""
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._files = KeyFiles("the certificate of the HTTP port", (cert, key), self._load)
        self._install()

    def refresh(self) -> bool:
        """Looks at the files; True when handshakes use new ones from now on."""
        if not self._files.refresh():
            return False
        self._install()
        return True

    def _load(self) -> None:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._cert, self._key, "--http-tls-cert", "--http-tls-key")

    def _install(self) -> None:
        load_pair(self.context, self._cert, self._key, "--http-tls-cert", "--http-tls-key")


def client_context(ca: str) -> ssl.SSLContext:
    """For HTTP clients: the system's authorities, and those in the file. Raises ConfigError."""
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--http-ca {ca} holds no certificates: {exc}", field="http_ca") from exc
    return context


def pinned_context(cert: str) -> ssl.SSLContext:
    """For an HTTP client that knows its server's certificate, whatever that is called. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    try:
        context.load_verify_locations(cert)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--http-tls-cert {cert} holds no certificate: {exc}", field="http_tls_cert") from exc
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def load_pair(context: ssl.SSLContext, cert: Path, key: Path, cert_option: str, key_option: str) -> None:
    """Gives a context its certificate. Raises ConfigError that names the option."""
    read_key_file(cert, cert_option)  # says which of the two is not there
    read_key_file(key, key_option)
    try:
        context.load_cert_chain(cert, key, password="")  # never asks a terminal
    except (OSError, ValueError) as exc:
        why = getattr(exc, "reason", None) or exc
        raise ConfigError(
            f"{cert_option} {cert} and {key_option} {key} are no certificate with its unencrypted key: {why}",
            field=cert_option,
        ) from exc


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake in memory. Raises ssl.SSLError when either end refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(8):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not ends:
            return
    raise ssl.SSLError("the handshake does not end")


def hint(message: str) -> str:
    """What to look at when a connection failed as gRPC says in `message`; "" when TLS has nothing to do with it."""
    if _MISNAMED.search(message):
        return "the peer's certificate does not name the host that was dialled; look at --tls-name, or give it the name"
    if _TROUBLE.search(message):
        return f"look at {OPTIONS} of both ends: all processes of a mesh have them, or none"
    if _HUNG_UP.search(message):
        return f"the peer hung up: it wants TLS, or refuses this process's certificate; look at {OPTIONS}"
    return ""
