"""Digests that two processes must compute alike. Torch-free."""

from __future__ import annotations

import hashlib
import hmac
import struct
from pathlib import Path

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizer_digest(directory: str | Path) -> str:
    """Returns the digest of what turns text and chats into token ids in a model directory.

    A file that is not there counts as absent, which differs from an empty one.
    """
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = Path(directory) / name
        content = path.read_bytes() if path.is_file() else None
        size = -1 if content is None else len(content)
        digest.update(f"{name}:{size}:".encode())
        digest.update(content or b"")
    return digest.hexdigest()[:32]


def session_proof(pair_secret: bytes, link_id: int, room: int, attempt: int) -> bytes:
    """What shows that whoever opens a session over a link is the link's other end: both know the pair's secret."""
    return hmac.digest(pair_secret, b"pdmesh session" + struct.pack("<QQQ", link_id, room, attempt), "sha256")
