"""Routers as commands ask them: over HTTP, at the addresses that Bootstrap tells, and why one gave no answer."""

from __future__ import annotations

import re
from typing import NamedTuple

import httpx

from services.runtime.api_keys import FILE_OPTION, OPTION, bearer
from services.runtime.tls import client_context

_VERIFY = re.compile(r"CERTIFICATE_VERIFY_FAILED\] certificate verify failed: (.+?)\.?(?: \(_ssl\.c:\d+\))?$")
_UNAUTHORIZED = 401


class Trouble(NamedTuple):
    """Why a router gave no answer; and what would help, where that is known."""

    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}" if self.advice else self.what

    @property
    def in_short(self) -> str:
        """What to do first, where there is room for little."""
        return f"{self.advice} ({self.what})" if self.advice else f"no answer: {self.what}"


def http_client(timeout: float, ca: str = "", key: str = "") -> httpx.AsyncClient:
    """A client for routers that shows them an API key. Raises ConfigError when the file of authorities is none."""
    verify = client_context(ca) if ca else True
    return httpx.AsyncClient(timeout=timeout, trust_env=False, verify=verify, headers=bearer(key))


def refusal(answer: httpx.Response) -> Trouble | None:
    """What an answer says that asks for a key; None for every other."""
    if answer.status_code != _UNAUTHORIZED:
        return None
    if "authorization" in answer.request.headers:
        return Trouble("it does not know the API key that it was shown", f"look at {FILE_OPTION} or {OPTION}")
    return Trouble("it wants an API key", f"give {FILE_OPTION}")


def trouble(exc: Exception) -> Trouble:
    """What went wrong with a request; `exc` is httpx.HTTPError, or ValueError for an answer that is no JSON."""
    if isinstance(exc, httpx.TimeoutException):
        return Trouble("nothing came in time")
    text = " ".join(str(exc).split())
    if (found := _VERIFY.search(text)) is None:
        return Trouble(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)
    why = found[1]
    if "mismatch" in why:
        advice = "certify that name, or tell the router one that is certified by --advertise-host"
    elif "expired" in why or "not yet valid" in why:
        advice = "renew it"
    else:
        advice = "give --http-ca, the file of its authority"
    return Trouble(f"its certificate can't be verified ({why})", advice)
