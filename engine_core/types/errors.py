"""The error tree.

PdmeshError
├── InvalidRequestError        the caller's fault; names the field       INVALID_ARGUMENT     400
│   └── ContextLengthError     the prompt leaves no room for one token   INVALID_ARGUMENT     400
├── NotFoundError              no such model, room, lease                NOT_FOUND            404
├── QueueFullError             bounded queue is full                     RESOURCE_EXHAUSTED   429
├── UnavailableError           nobody can serve it now                   UNAVAILABLE          503
│   └── PeerFailedError        another leg failed                        UNAVAILABLE          503
├── UnauthenticatedError       a peer has not shown that it belongs here UNAUTHENTICATED      503
├── FencedError                another incarnation or attempt            FAILED_PRECONDITION  409
├── DeadlineError              the deadline passed                       DEADLINE_EXCEEDED    504
├── CancelledSessionError      the caller went away                      CANCELLED            499
├── ConfigError                start-up configuration or model files     INTERNAL             500
└── InternalError              a broken promise of our own               INTERNAL             500

services/runtime/errors.py maps it to gRPC and HTTP, in one table.
"""

from __future__ import annotations

import enum


class Leg(enum.StrEnum):
    """The part of a request's way that failed."""

    UNKNOWN = "unknown"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"
    BOOTSTRAP = "bootstrap"


class PdmeshError(Exception):
    """Base of all errors that cross a border of pdmesh.

    `reason` is stable and machine-readable; `retryable` says that the same request may succeed
    elsewhere or later.
    """

    reason = "INTERNAL"
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        leg: Leg = Leg.UNKNOWN,
        reason: str | None = None,
        field: str = "",
        peer_incarnation: int = 0,
        retry_after: float = 0.0,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.leg = leg
        self.field = field
        self.peer_incarnation = peer_incarnation
        self.retry_after = retry_after
        if reason is not None:
            self.reason = reason
        if retryable is not None:
            self.retryable = retryable


class InvalidRequestError(PdmeshError):
    """The request is wrong; `field` names what."""

    reason = "INVALID_REQUEST"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for one token."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class NotFoundError(PdmeshError):
    """Nothing is known under that name."""

    reason = "NOT_FOUND"


class QueueFullError(PdmeshError):
    """A bounded queue is full."""

    reason = "QUEUE_FULL"
    retryable = True


class UnavailableError(PdmeshError):
    """Nobody can serve the request now."""

    reason = "UNAVAILABLE"
    retryable = True


class PeerFailedError(UnavailableError):
    """Another leg of the request failed; `leg` and `peer_incarnation` say which."""

    reason = "PEER_FAILED"


class UnauthenticatedError(PdmeshError):
    """A caller has not shown the mesh's token, or a process it called refused the one that it showed. An operator's
    fault, never a client's; another worker may be set up rightly."""

    reason = "UNAUTHENTICATED"
    retryable = True


class FencedError(PdmeshError):
    """The call means another incarnation or an old attempt."""

    reason = "FENCED"
    retryable = True


class DeadlineError(PdmeshError):
    """The deadline passed."""

    reason = "DEADLINE"


class CancelledSessionError(PdmeshError):
    """The caller went away."""

    reason = "CANCELLED"


class ConfigError(PdmeshError):
    """Configuration or model files are wrong; found before anything registers."""

    reason = "CONFIG"


class InternalError(PdmeshError):
    """A promise of our own is broken."""

    reason = "INTERNAL"
