"""What the role schedulers share: the outbox, the links they know, and the figures of their engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine_core.config import SchedulerConfig
from engine_core.kv.api import KvManager
from engine_core.lifecycle.machine import Move
from engine_core.scheduler.figures import Distributions
from engine_core.scheduler.messages import ErrorInfo, Frame, Outputs, PromptLogprobs, SessionOutput
from engine_core.scheduler.pacing import StepPacer
from engine_core.scheduler.step import SequenceFailure
from engine_core.transfer.base import LinkClosed, LinkOpened, TransferCommand
from engine_core.types.errors import InternalError, Leg, PdmeshError, PeerFailedError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout
from engine_core.types.request import Finish, Role
from engine_core.types.sampling import TokenLogprobs

SCORES_PER_FRAME = 512
"""Prompt positions that one frame carries at most: some 150 KB with 20 best tokens each."""


class Outbox:
    """Collects what a scheduler wants to say until the host takes it.

    Commands are to be carried out before frames are sent: a ticket may only leave when its blocks can
    be written.
    """

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._commands: list[TransferCommand] = []
        self._outputs: dict[SessionId, SessionOutput] = {}
        self.moves: list[Move] = []

    def frame(self, frame: Frame) -> None:
        """Queues a frame. Outputs that are pending go first, so that order holds per session."""
        self._flush()
        self._frames.append(frame)

    def command(self, command: TransferCommand) -> None:
        """Queues a transfer command."""
        self._commands.append(command)

    def output(
        self,
        session: SessionId,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: Finish | None = None,
        error: ErrorInfo | None = None,
        cached_tokens: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Queues output of a session, joined with what it has pending."""
        before = self._outputs.get(session)
        output = SessionOutput(session, first_index, token_ids, finish, error, cached_tokens, logprobs)
        self._outputs[session] = output if before is None else before.joined(output)

    def scores(self, session: SessionId, first_position: int, positions: tuple[TokenLogprobs, ...]) -> None:
        """Queues log probabilities of prompt positions, in frames of bounded size."""
        for at in range(0, len(positions), SCORES_PER_FRAME):
            self.frame(PromptLogprobs(session, first_position + at, positions[at : at + SCORES_PER_FRAME]))

    def _flush(self) -> None:
        if self._outputs:
            self._frames.append(Outputs(tuple(self._outputs.values())))
            self._outputs = {}

    def take_frames(self) -> list[Frame]:
        """Hands over the frames, in order."""
        self._flush()
        frames, self._frames = self._frames, []
        return frames

    def take_commands(self) -> list[TransferCommand]:
        """Hands over the commands, in order."""
        commands, self._commands = self._commands, []
        return commands


@dataclass(slots=True)
class KnownLink:
    """A link as the schedulers see it."""

    peer_incarnation: Incarnation
    peer_instance: str
    transport: str = ""
    reason: str = ""
    up: bool = False
    closed: bool = False
    quiet_proved: bool = False
    local_quiet: bool = False
    sessions: set[SessionId] = field(default_factory=set)


class LinkBook:
    """Links by id. A closed one is kept while a session refers to it, for its proof of quiet."""

    def __init__(self) -> None:
        self._links: dict[int, KnownLink] = {}

    def get(self, link_id: int) -> KnownLink | None:
        """The link, or None when nothing is known of it."""
        return self._links.get(link_id)

    def is_up(self, link_id: int) -> bool:
        """True while the link can carry KV."""
        link = self._links.get(link_id)
        return link is not None and link.up

    def opened(self, event: LinkOpened) -> None:
        """Records a link that is up."""
        self._links[event.link_id] = KnownLink(
            event.peer_incarnation, event.peer_instance, event.transport, event.reason, True,
            local_quiet=event.local_quiet,
        )  # fmt: skip

    def closed(self, event: LinkClosed) -> tuple[SessionId, ...]:
        """Records the end of a link; returns the sessions that refer to it."""
        link = self._links.get(event.link_id)
        if link is None:
            return ()
        link.up, link.closed = False, True
        link.quiet_proved = link.quiet_proved or event.quiet_proved
        sessions = tuple(sorted(link.sessions))
        self._prune(event.link_id, link)
        return sessions

    def attach(self, link_id: int, session: SessionId) -> None:
        """A session uses the link from now on."""
        self._links[link_id].sessions.add(session)

    def detach(self, link_id: int, session: SessionId) -> None:
        """A session needs the link no more."""
        link = self._links.get(link_id)
        if link is not None:
            link.sessions.discard(session)
            self._prune(link_id, link)

    def _prune(self, link_id: int, link: KnownLink) -> None:
        if link.closed and not link.sessions:
            del self._links[link_id]


@dataclass(slots=True)
class SchedulerContext:
    """Everything around a role scheduler."""

    role: Role
    config: SchedulerConfig
    kv: KvManager
    layout: KvLayout
    eos_token_ids: frozenset[int]
    max_model_len: int
    verify_kv: bool = False
    vocab_size: int = 0
    """Token ids that the model knows; 0 checks none."""
    out: Outbox = field(default_factory=Outbox)
    links: LinkBook = field(default_factory=LinkBook)
    counters: Counter[str] = field(default_factory=Counter)
    distributions: Distributions = field(default_factory=Distributions)
    pacer: StepPacer = field(init=False)

    def __post_init__(self) -> None:
        self.pacer = StepPacer(self.config.max_step_stretch)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.groups[0].block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool can hold for one sequence."""
        return min(g.num_blocks - 1 for g in self.layout.groups) * self.block_size

    def failure(self, failure: SequenceFailure, leg: Leg) -> PdmeshError:
        """What a sequence that a step could not compute ends with."""
        if failure.lost:
            return PeerFailedError(failure.message, leg=leg, reason="SEQUENCE_LOST")
        return InternalError(failure.message, leg=leg, reason="NUMBERS")

    def log_move(self, move: Move) -> None:
        """Keeps a move for the explain ring and counts it."""
        self.out.moves.append(move)
        self.counters[f"moves.{move.machine}.{move.target}"] += 1
