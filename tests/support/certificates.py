"""Certificates for tests: an authority, and files as the options name them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import trustme

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._ca.cert_pem.bytes()

    def issue(self, *names: str, expired: bool = False) -> tuple[bytes, bytes]:
        """(chain, key) as PEM, for `names` instead of 127.0.0.1."""
        until: dict[str, Any] = {"not_before": LONG_AGO, "not_after": LONG_AGO + datetime.timedelta(days=1)}
        leaf = self._ca.issue_cert(*(names or ("127.0.0.1",)), **(until if expired else {}))
        return b"".join(part.bytes() for part in leaf.cert_chain_pems), leaf.private_key_pem.bytes()


class Files:
    """tls.crt, tls.key, ca.crt and token in a folder. Certificates change all at once, as a cluster changes mounted
    secrets: by a link to a folder that is turned over."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._versions = folder, 0
        now = folder / "now"
        self.cert, self.key, self.ca = now / "tls.crt", now / "tls.key", now / "ca.crt"
        self.token = folder / "token"
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes | str) -> None:
        """Replaces one file."""
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data.encode() if isinstance(data, str) else data)
        fresh.replace(path)

    def tokens(self, *tokens: str) -> None:
        """Writes the token file."""
        self.write(self.token, "".join(f"{token}\n" for token in tokens))

    def certify(self, authority: Authority, *names: str, expired: bool = False, trusted: bytes = b"") -> None:
        """Writes a new certificate with its key, and the authorities to trust."""
        cert, key = authority.issue(*names, expired=expired)
        self._versions += 1
        version = self.folder / f"version-{self._versions}"
        version.mkdir()
        for path, data in ((self.cert, cert), (self.key, key), (self.ca, trusted or authority.pem)):
            (version / path.name).write_bytes(data)
        link = self.folder / "next"
        link.symlink_to(version)
        link.replace(self.cert.parent)

    @property
    def token_options(self) -> dict[str, Any]:
        """For a process with the token."""
        return {"mesh_token_file": str(self.token)}

    @property
    def tls_options(self) -> dict[str, Any]:
        """For a process with the certificate."""
        return {"tls_cert": str(self.cert), "tls_key": str(self.key), "tls_ca": str(self.ca)}
