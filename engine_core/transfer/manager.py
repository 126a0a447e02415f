"""KVTransferManager: the links of one engine process, behind the engine's TransferPort.

Threads:
  kv-links      one: a selector over listening sockets, callers and all links. It carries out commands,
                reads what peers say, receives KV (tcp) and owns every socket.
  kv-push-…     one per outgoing link: connects, then copies or sends (sender.py).
  kv-verify     one, from the first VerifyBlocks on.

A command's way: `submit` puts it into a queue and wakes kv-links, which carries it out between two reads
at the latest; so commands keep their order, and `submit` never waits. Events are posted from kv-links and
from push threads, never from the caller of `submit`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence

from engine_core.config import DisaggConfig
from engine_core.plugins import TRANSPORTS, load
from engine_core.transfer.acceptor import Acceptor
from engine_core.transfer.base import (
    AbortReceived,
    CancelPush,
    CloseLink,
    Connect,
    DropReceive,
    ExpectLink,
    LinkClosed,
    LinkCommand,
    LinkFigures,
    LinkOpened,
    PostEvent,
    PrepareReceive,
    Push,
    PushFailed,
    ReceiveQuiet,
    SendAbort,
    SendQuiet,
    SetTokens,
    SourceQuiet,
    TransferCommand,
    Verified,
    VerifyBlocks,
)
from engine_core.transfer.checksum import BlockChecksum
from engine_core.transfer.copy_plan import check_compatible
from engine_core.transfer.handshake import LinkSecrets
from engine_core.transfer.links import AUTO_ORDER, Dialler, Links, OutboundLink
from engine_core.transfer.receiver import Caller, InboundLink
from engine_core.transfer.sender import Sender
from engine_core.transfer.transport import Cancel, Interrupt, PoolRegion, Transport, TransportContext, Writer
from engine_core.transfer.wire import Abort, Close, EndOfLink, ProtocolError, Received
from engine_core.types.errors import InternalError
from engine_core.types.ids import Incarnation
from engine_core.types.kv import KvLayout, TransferDescriptor

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 4.0
_JOIN_SECONDS = 5.0

Handler = Callable[[int], None]
"""Called with the selector's mask when a socket is ready."""


class KVTransferManager:
    """Implements TransferPort; see its contract in base.py.

    `region` stays the caller's: it is to be closed after the manager. Raises ConfigError when a socket
    can't be opened or the configured transport is not known.
    """

    def __init__(
        self,
        config: DisaggConfig,
        incarnation: Incarnation,
        instance: str,
        region: PoolRegion,
        layout: KvLayout,
        post: PostEvent,
        *,
        accept_links: bool,
        tokens: Sequence[bytes] = (),
    ) -> None:
        self._config, self._region, self._layout, self._post = config, region, layout, post
        self._secrets = LinkSecrets(tokens)
        self._context = TransportContext(config, incarnation, instance, region, layout, self._secrets)
        names = dict.fromkeys((*AUTO_ORDER, *(n for n in (config.transfer_backend,) if n != "auto")))
        self._transports: dict[str, Transport] = {
            name: load(TRANSPORTS, "transport", name)(self._context) for name in names
        }
        self._dialler = Dialler(config, self._transports)
        self._links = Links()
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._selector, self._context, self._links.taken, self._on_arrival)
        self._wake = Interrupt()
        self._tasks: collections.deque[TransferCommand | Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()
        self._open, self._closing_at = True, 0.0
        self._verifier: concurrent.futures.ThreadPoolExecutor | None = None
        self._descriptors: list[TransferDescriptor] = []
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ, self._on_wake)
        try:
            if accept_links:
                chosen = config.transfer_backend
                doors = AUTO_ORDER if chosen in ("auto", "scripted") else (chosen,)
                self._descriptors = self._acceptor.listen([self._transports[name] for name in doors])
        except BaseException:
            self._tear_down()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-links", daemon=True)
        self._thread.start()

    # ---- the port -----------------------------------------------------------------------------------

    def descriptors(self) -> tuple[TransferDescriptor, ...]:
        """How peers reach this pool."""
        return tuple(self._descriptors)

    def submit(self, command: TransferCommand) -> None:
        """Queues a command; after `close` it is ignored."""
        self._enqueue(command)

    def figures(self) -> tuple[LinkFigures, ...]:
        """Links that are up or connecting, then the last ones that were."""
        return self._links.figures()

    def close(self) -> None:
        """See the port."""
        self._enqueue(self._begin_to_close)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            log.error("the transfer threads did not end within %g s", _JOIN_SECONDS)

    # ---- the loop -----------------------------------------------------------------------------------

    def _enqueue(self, task: TransferCommand | Callable[[], None]) -> None:
        with self._lock:
            if self._open:
                self._tasks.append(task)
                self._wake.set()

    def _run(self) -> None:
        while not self._done():
            timeout = self._timeout()
            for key, mask in self._selector.select(timeout):
                handler: Handler = key.data
                try:
                    handler(mask)
                except Exception:
                    log.exception("a transfer handler failed")
            self._carry_out_tasks()
            self._acceptor.drop_late()
            self._ask_for_writability()
        self._tear_down()

    def _done(self) -> bool:
        if not self._closing_at:
            return False
        late = time.monotonic() >= self._closing_at
        if late and self._links.outbound:
            log.error("push threads of links %s did not end", [f"{i:x}" for i in self._links.outbound])
        return late or not self._links.outbound

    def _timeout(self) -> float | None:
        deadlines = [at for at in (self._acceptor.deadline, self._closing_at or None) if at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _on_wake(self, mask: int) -> None:
        self._wake.clear()

    def _carry_out_tasks(self) -> None:
        while self._tasks:
            task = self._tasks.popleft()
            try:
                if callable(task):
                    task()
                else:
                    self._carry_out(task)
            except Exception:
                log.exception("a transfer command failed: %s", type(task).__name__)

    def _begin_to_close(self) -> None:
        if self._closing_at:
            return
        self._closing_at = time.monotonic() + _CLOSE_SECONDS
        self._acceptor.close()
        for outbound in list(self._links.outbound.values()):
            outbound.sender.stop("closed here")
        for inbound in list(self._links.inbound.values()):
            self._end_inbound(inbound, "closed here", quiet_proved=inbound.transport.local_quiet)

    def _tear_down(self) -> None:
        with self._lock:
            self._open = False
        self._acceptor.close()
        for transport in self._transports.values():
            transport.close()
        if self._verifier is not None:
            self._verifier.shutdown(cancel_futures=True)
        self._selector.close()
        self._wake.close()

    # ---- commands -----------------------------------------------------------------------------------

    def _carry_out(self, command: TransferCommand) -> None:
        if isinstance(command, Connect):
            self._connect(command)
        elif isinstance(command, ExpectLink):
            self._secrets.expect(command.peer_incarnation, command.secret)
            self._acceptor.expected(command.peer_incarnation)
        elif isinstance(command, SetTokens):
            self._secrets.tokens = command.tokens
        elif isinstance(command, VerifyBlocks):
            self._verify(command)
        elif (outbound := self._links.outbound.get(command.link_id)) is not None:
            self._carry_out_outbound(outbound, command)
        elif (inbound := self._links.inbound.get(command.link_id)) is not None:
            self._carry_out_inbound(inbound, command)
        else:
            self._carry_out_gone(command)

    def _carry_out_outbound(self, link: OutboundLink, command: LinkCommand) -> None:
        match command:
            case Push():
                link.sender.push(command)
            case CancelPush(session=session):
                link.sender.cancel(session)
            case SendQuiet(session=session):
                link.sender.quiet(session)
            case CloseLink():
                link.sender.stop("closed here")
            case _:
                log.error("link %x is a writer's: %s means nothing", command.link_id, type(command).__name__)

    def _carry_out_inbound(self, link: InboundLink, command: LinkCommand) -> None:
        match command:
            case PrepareReceive(session=session, block_ids=block_ids):
                link.prepare(session, block_ids)
            case DropReceive(session=session):
                if link.drop(session):
                    self._post(ReceiveQuiet(link.link_id, session))
            case SendAbort(session=session):
                link.abort(session)
            case CloseLink() if link.transport.local_quiet:
                self._end_inbound(link, "closed here", quiet_proved=True)
            case CloseLink():
                link.ask_to_close()  # only its end-of-file proves that the writer has unmapped
            case _:
                log.error("link %x is a reader's: %s means nothing", command.link_id, type(command).__name__)

    def _carry_out_gone(self, command: LinkCommand) -> None:
        match command:
            case Push(link_id=link_id, session=session, push_id=push_id):
                self._post(PushFailed(link_id, session, push_id, "the link is gone"))
            case CancelPush(link_id=link_id, session=session):
                self._post(SourceQuiet(link_id, session))
            case DropReceive(link_id=link_id, session=session) if self._links.quiet_proved(link_id):
                self._post(ReceiveQuiet(link_id, session))
            case _:
                return

    def _verify(self, command: VerifyBlocks) -> None:
        if self._verifier is None:
            self._verifier = concurrent.futures.ThreadPoolExecutor(1, "kv-verify")
        self._verifier.submit(self._post_checksum, command)

    def _post_checksum(self, command: VerifyBlocks) -> None:
        checksum = BlockChecksum(self._layout)
        try:
            checksum.update(self._region.buffer, command.block_ids)
        except ValueError as exc:
            log.error("session %s can't be verified: %s", command.session, exc)
            self._post(Verified(command.link_id, command.session, -1))  # equals no CRC-32
            return
        self._post(Verified(command.link_id, command.session, checksum.value))

    # ---- outgoing links -----------------------------------------------------------------------------

    def _connect(self, command: Connect) -> None:
        link_id = command.link_id
        if link_id in self._links.outbound or link_id in self._links.inbound:
            log.error("link %x exists; it is not opened again", link_id)
            return
        if self._links.taken(link_id) or self._closing_at:
            reason = "the link was closed before" if not self._closing_at else "closed here"
            self._post(LinkClosed(link_id, command.peer_incarnation, reason, quiet_proved=True))
            return
        try:
            check_compatible(self._layout, command.layout)
        except ValueError as exc:
            reason = f"KV layouts do not fit: {exc}"
            self._post(LinkClosed(link_id, command.peer_incarnation, reason, quiet_proved=True))
            return

        def opened(writer: Writer) -> None:  # in the push thread, before its first push
            self._post(
                LinkOpened(
                    link_id,
                    command.peer_incarnation,
                    command.peer_instance,
                    link.transport,
                    writer.reason,
                    writer.local_quiet,
                )
            )
            self._enqueue(functools.partial(self._watch_outbound, link, writer))

        def connect(interrupt: Interrupt, stop: Cancel) -> Writer:
            link.transport, writer = self._dialler.dial(command, interrupt, stop)
            return writer

        link = OutboundLink(
            command,
            Sender(
                link_id,
                connect,
                self._region,
                self._layout,
                command.layout,
                self._post,
                opened,
                lambda reason: self._enqueue(functools.partial(self._end_outbound, link, reason)),
                verify=self._config.verify_kv,
            ),
        )
        self._links.outbound[link_id] = link
        link.sender.start()

    def _watch_outbound(self, link: OutboundLink, writer: Writer) -> None:
        link.writer, link.watched = writer, True
        self._selector.register(writer.sock, selectors.EVENT_READ, functools.partial(self._on_outbound, link, writer))

    def _on_outbound(self, link: OutboundLink, writer: Writer, mask: int) -> None:
        try:
            while (message := writer.reader.read()) is not None:
                match message:
                    case Received(session=session, push_id=push_id, nbytes=nbytes):
                        link.sender.received(session, push_id, nbytes)
                    case Abort(session=session):
                        self._post(AbortReceived(link.connect.link_id, session))
                    case Close():
                        link.sender.stop("closed by the peer")
                    case _:
                        raise ProtocolError(f"{type(message).__name__} is nothing that a reader sends")
        except (EndOfLink, ProtocolError) as exc:
            self._selector.unregister(writer.sock)
            link.watched = False
            link.sender.stop(str(exc))

    def _end_outbound(self, link: OutboundLink, reason: str) -> None:
        """The push thread has ended, and has unmapped: now the socket may go."""
        if link.writer is not None:
            if link.watched:
                self._selector.unregister(link.writer.sock)
            link.writer.sock.close()
        link.sender.finish(reason)
        self._links.end_outbound(link, reason)
        self._post(LinkClosed(link.connect.link_id, link.connect.peer_incarnation, reason, quiet_proved=True))

    # ---- incoming links -----------------------------------------------------------------------------

    def _on_arrival(self, caller: Caller) -> None:
        hello, ready = caller.hello, caller.ready
        if hello is None or ready is None:
            raise InternalError("a caller was handed over before it greeted")
        link = InboundLink(caller, hello, ready.reason, self._region, self._layout, self._post)
        self._links.inbound[link.link_id] = link
        self._selector.modify(link.sock, selectors.EVENT_READ, functools.partial(self._on_inbound, link))
        kind, local_quiet = link.transport.name, link.transport.local_quiet
        self._post(LinkOpened(link.link_id, link.peer_incarnation, hello.instance, kind, link.reason, local_quiet))

    def _on_inbound(self, link: InboundLink, mask: int) -> None:
        if link.closed:
            return
        if mask & selectors.EVENT_WRITE:
            link.on_writable()
        if mask & selectors.EVENT_READ:
            try:
                ended = link.on_readable(self._carry_out_tasks)
            except Exception as exc:
                log.exception("link %x: reading failed", link.link_id)
                ended = link.give_up(f"reading failed: {exc!r}")
            if ended is not None and not link.closed:
                self._end_inbound(link, ended, quiet_proved=True)

    def _end_inbound(self, link: InboundLink, reason: str, *, quiet_proved: bool) -> None:
        link.closed = True
        self._selector.unregister(link.sock)
        link.sock.close()
        self._links.end_inbound(link, reason, quiet_proved=quiet_proved)
        self._post(LinkClosed(link.link_id, link.peer_incarnation, reason, quiet_proved=quiet_proved))

    def _ask_for_writability(self) -> None:
        for link in self._links.inbound.values():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
            key = self._selector.get_key(link.sock)
            if key.events != wanted:
                self._selector.modify(link.sock, wanted, key.data)
