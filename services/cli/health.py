"""`pdmesh health ADDRESS`: asks one process whether it serves, for probes of process managers.

gRPC addresses (host:port, unix:path) are asked by grpc.health.v1, URLs by GET. Exit code 0 when it serves, 1 with a
line that says why when it does not, 2 for wrong arguments. Health needs no mesh token, but with mTLS a certificate.
A probe runs every few seconds, so nothing heavy is imported here: services.cli.entry comes straight to main().
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_HTTP = ("http://", "https://")


def main(arguments: Sequence[str]) -> int:
    """Runs the command on what follows `pdmesh health`; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        if given.address.startswith(_HTTP):
            reason = _ask_http(given.address, given.timeout, given.tls_ca)
        else:
            reason = _ask_grpc(given)
    except OSError as exc:  # files that can't be read
        reason = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    if reason:
        print(f"pdmesh health: {given.address}: {' '.join(reason.split())}", file=sys.stderr)
    return 1 if reason else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pdmesh health", description="Ask one process whether it serves.")
    parser.add_argument("address", metavar="ADDRESS", help="host:port or unix:path of a gRPC service, or a URL")
    parser.add_argument("--service", default="", metavar="NAME", help="full name of one gRPC service, or liveness")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="for the answer [default: 2]")
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="own certificate chain, for mTLS")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="authorities that the other end must have; TLS on")
    parser.add_argument("--tls-name", default="", metavar="NAME", help="name in its certificate, if not the host's")
    return parser


def _ask_http(url: str, timeout: float, ca: str) -> str:
    """Why the answer is not 200; "" when it is."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    context = ssl.create_default_context(cafile=ca or None) if url.startswith("https:") else None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=timeout) as answer:
            return "" if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as exc:
        with exc:
            return f"HTTP {exc.code}: {exc.read(300).decode(errors='replace')}"
    except urllib.error.URLError as exc:
        unknown = isinstance(exc.reason, ssl.SSLCertVerificationError) and not ca
        return f"{exc.reason}{'; name the authority of its certificate with --tls-ca' if unknown else ''}"
    except (http.client.HTTPException, OSError, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def _ask_grpc(given: argparse.Namespace) -> str:
    """Why the service does not serve; "" when it does. Raises OSError for files that can't be read."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if given.tls_name:
        options.append(("grpc.ssl_target_name_override", given.tls_name))
    if given.tls_ca:
        key, cert = (Path(file).read_bytes() if file else None for file in (given.tls_key, given.tls_cert))
        credentials = grpc.ssl_channel_credentials(Path(given.tls_ca).read_bytes(), key, cert)
        channel = grpc.secure_channel(given.address, credentials, options)
    else:
        channel = grpc.insecure_channel(given.address, options)
    request = health_pb2.HealthCheckRequest(service=given.service)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=given.timeout)
    except grpc.RpcError as exc:
        if exc.code() is grpc.StatusCode.NOT_FOUND:
            return f"it has no service {given.service!r}"
        return f"{exc.code().name}: {exc.details()}"
    finally:
        channel.close()
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
