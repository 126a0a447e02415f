"""Who a worker is: fixed once its engine is ready."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine_core.host.frames import Ready
from engine_core.types.errors import FencedError, Leg
from engine_core.types.ids import Incarnation
from engine_core.types.kv import fingerprint_of
from engine_core.types.request import Role


@dataclass(frozen=True)
class WorkerIdentity:
    """One life of one worker."""

    instance: str
    role: Role
    incarnation: Incarnation
    ready: Ready

    @property
    def leg(self) -> Leg:
        """The part of a request's way that runs here."""
        return Leg.PREFILL if self.role is Role.PREFILL else Leg.DECODE

    @cached_property
    def fingerprint(self) -> str:
        """What a peer must share."""
        return fingerprint_of(self.ready.fingerprint_parts)

    def check_incarnation(self, expected: int) -> None:
        """Raises FencedError with the own incarnation when a caller means another life. 0 means any."""
        if expected not in (0, self.incarnation):
            raise FencedError(
                f"{self.instance} is incarnation {self.incarnation}; incarnation {expected} was meant",
                leg=self.leg,
                reason="INCARNATION_MISMATCH",
                peer_incarnation=self.incarnation,
            )

    def check_fingerprint(self, digest: str, parts: dict[str, str] | None = None) -> None:
        """Raises FencedError naming what differs (as far as the other's `parts` are known). "" passes."""
        if digest and digest != self.fingerprint:
            raise FencedError(
                f"fingerprints differ: {self.difference(digest, parts)}",
                leg=self.leg,
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
                peer_incarnation=self.incarnation,
            )

    def difference(self, digest: str, parts: dict[str, str] | None) -> str:
        """What differs from another worker, in words."""
        own = self.ready.fingerprint_parts
        if parts:
            named = [
                f"{name} is {own.get(name, 'unset')} here, {parts.get(name, 'unset')} there"
                for name in sorted(own.keys() | parts.keys())
                if own.get(name) != parts.get(name)
            ]
            if named:
                return "; ".join(named)
        return f"{self.fingerprint} here, {digest} there"
