"""Who may speak to this process, and how it shows who it is: the mesh token, mTLS, or both.

    security = Security.of(config)                       reads the files; ConfigError names option and file
    GrpcServer.start(address, …, security=security)      asks callers for both, as far as they are configured
    ChannelPool(timeout, security=security)              shows both to peers
    tasks.spawn(security.watch(), "key files")           takes up changed files, within about a second

Health checks need no token: they tell nothing but that the process serves, and who probes it seldom has one. All
else does, reflection included. With mTLS nobody without a certificate gets as far as that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc

from engine_core.types.errors import ConfigError, Leg, UnauthenticatedError
from services.runtime import token as mesh_token
from services.runtime.addresses import is_loopback
from services.runtime.errors import abort_with
from services.runtime.handshakes import Handshakes
from services.runtime.tls import OPTIONS, MeshTls
from services.runtime.token import MeshToken

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often files are looked at."""

HEALTH = "/grpc.health.v1.Health/"
_QUIET_SECONDS = 10.0
_PEERS_REMEMBERED = 1_000


class SecurityOptions(Protocol):
    """The options; services.config.CommonConfig has them."""

    @property
    def mesh_token_file(self) -> str: ...
    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_ca(self) -> str: ...
    @property
    def tls_name(self) -> str: ...
    @property
    def insecure(self) -> bool: ...


class Refreshable(Protocol):
    """What is made of files that may change."""

    def refresh(self) -> bool:
        """Looks at the files; True when they changed. Raises nothing."""


class Security:
    """The token and the certificate of one process. Used on one event loop only."""

    def __init__(self, token: MeshToken | None = None, tls: MeshTls | None = None, *, insecure: bool = False) -> None:
        self.token, self.tls, self._insecure = token, tls, insecure
        self._handshakes: Handshakes | None = None
        self._complaints = Complaints()
        self._parts: list[Refreshable] = [part for part in (token, tls) if part is not None]
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def of(cls, options: SecurityOptions) -> Security:
        """Reads what the options name. Raises ConfigError."""
        parts = {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key, "--tls-ca": options.tls_ca}
        missing = [name for name, value in parts.items() if not value]
        if missing and len(missing) < len(parts):
            raise ConfigError(f"mTLS needs {OPTIONS}; there is no {' and no '.join(missing)}", field=missing[0])
        token = MeshToken(Path(options.mesh_token_file)) if options.mesh_token_file else None
        tls = None
        if not missing:
            tls = MeshTls(Path(options.tls_cert), Path(options.tls_key), Path(options.tls_ca), options.tls_name)
        return cls(token, tls, insecure=options.insecure)

    @property
    def link_secrets(self) -> tuple[bytes, ...]:
        """Keys for the links between engines, the one to use first; empty without a token."""
        return () if self.token is None else self.token.secrets

    def check_host(self, host: str, option: str = "--host") -> None:
        """Raises ConfigError when a host can be reached from other machines and nothing protects it."""
        if self.token is not None or self.tls is not None or self._insecure or is_loopback(host):
            return
        raise ConfigError(
            f"{option} {host or '(all addresses)'} can be reached from other machines, and nothing asks callers who "
            f"they are: give --mesh-token-file, or {OPTIONS}, or --insecure to do without",
            field=option.removeprefix("--").replace("-", "_"),
        )

    # ---- changes ------------------------------------------------------------------------------------

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back, on the event loop, after files have changed."""
        self._callbacks.append(callback)

    def also(self, part: Refreshable) -> None:
        """Watches these files too."""
        self._parts.append(part)

    def refresh(self) -> bool:
        """Looks at the files now; True when something changed."""
        changed = [part.refresh() for part in self._parts]
        if any(changed):
            for callback in self._callbacks:
                callback()
        return any(changed)

    async def watch(self) -> None:
        """Looks at the files until cancelled; spawn it with a TaskOwner."""
        while self._parts:
            await asyncio.sleep(POLL_SECONDS)
            self.refresh()
            self.tell_refused()

    # ---- as a client --------------------------------------------------------------------------------

    @property
    def channel_generation(self) -> int:
        """Changes when channels have to be made anew."""
        return 0 if self.tls is None else self.tls.generation

    def channel(self, endpoint: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel that shows token and certificate. Unix sockets have no need of TLS."""
        plain = self.tls is None or endpoint.startswith("unix:")
        channel = grpc.aio.insecure_channel(endpoint, options=options) if plain else None
        if channel is None:
            assert self.tls is not None
            channel = self.tls.channel(endpoint, options)
        return channel if self.token is None else TokenChannel(channel, self.token)

    # ---- as a server --------------------------------------------------------------------------------

    def interceptors(self, leg: Leg) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        """What asks for the token, ahead of all others."""
        return [] if self.token is None else [TokenInterceptor(self.token, leg, self._complaints, self.heard)]

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Binds. Raises RuntimeError as gRPC does."""
        if self.tls is None or address.startswith("unix:"):
            return int(server.add_insecure_port(address))
        handshakes = Handshakes()
        handshakes.port = int(server.add_secure_port(address, self.tls.server_credentials(handshakes.begun)))
        self._handshakes = handshakes
        return handshakes.port

    def heard(self, peer: str) -> None:
        """A call came from this peer, as gRPC names it."""
        if self._handshakes is not None:
            self._handshakes.spoke(peer)

    def tell_refused(self) -> None:
        """Warns of peers that did not come through TLS."""
        for peer in self._handshakes.refused() if self._handshakes is not None else ():
            self._complaints.say(
                peer,
                "refused by TLS, or gone before its first call: it must speak TLS, and show a certificate that has not "
                "expired, of an authority in --tls-ca",
            )


class TokenChannel(grpc.aio.Channel):
    """A channel whose calls carry the token as it is when they begin.

    Not by gRPC's interceptors, which put a task and a queue of their own between a stream and its reader; nor by its
    call credentials, which it refuses to send without TLS.
    """

    def __init__(self, channel: grpc.aio.Channel, token: MeshToken) -> None:
        self._channel, self._token = channel, token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As the channel's own; so are the others."""
        return _Tokened(self._channel.unary_unary(*args, **kwargs), self._token)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Tokened(self._channel.unary_stream(*args, **kwargs), self._token)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Tokened(self._channel.stream_unary(*args, **kwargs), self._token)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Tokened(self._channel.stream_stream(*args, **kwargs), self._token)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002  # gRPC's
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Tokened:
    """A method of a channel, with the token."""

    __slots__ = ("_method", "_token")

    def __init__(self, method: Any, token: MeshToken) -> None:
        self._method, self._token = method, token

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return self._method(*args, metadata=(*(metadata or ()), self._token.metadata()), **kwargs)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses calls without a token that counts: UNAUTHENTICATED, before anything of the call is read."""

    def __init__(self, token: MeshToken, leg: Leg, complaints: Complaints, heard: Callable[[str], None]) -> None:
        self._token, self._leg, self._complaints, self._heard = token, leg, complaints, heard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Lets the call pass, or puts a refusal in its place."""
        if handler_call_details.method.startswith(HEALTH):
            return await continuation(handler_call_details)
        why = self._token.refusal(handler_call_details.invocation_metadata)
        if not why:
            return await continuation(handler_call_details)
        method = handler_call_details.method

        async def refuse(_: Any, context: Any) -> None:
            self._heard(context.peer())
            self._complaints.say(context.peer(), f"refused {method}: {why}")
            reason = "TOKEN_MISSING" if why == mesh_token.MISSING else "TOKEN_REFUSED"
            message = f"{why}; look at {mesh_token.OPTION} of the caller: it must hold a token of this mesh"
            await abort_with(context, UnauthenticatedError(message, leg=self._leg, reason=reason))

        # Of the kind that reads nothing by itself, which fits callers of every kind.
        return grpc.stream_stream_rpc_method_handler(refuse)


class Complaints:
    """Warnings about peers: each at once, and then at most every ten seconds, with how often it held meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def say(self, peer: str, what: str) -> None:
        """Warns that `peer` (host:port, with or without a scheme before it) did something."""
        key, now = (peer.rpartition(":")[0], what), self._clock()
        at, held_back = self._said.pop(key, (-_QUIET_SECONDS, 0))
        if now - at < _QUIET_SECONDS:
            self._said[key] = (at, held_back + 1)
            return
        self._said[key] = (now, 0)
        while len(self._said) > _PEERS_REMEMBERED:
            self._said.popitem(last=False)
        more = f" ({held_back} times more since the last such line)" if held_back else ""
        log.warning("peer %s: %s%s", peer, what, more)
