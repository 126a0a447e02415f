"""The router's tokenizer: a model directory's tokenizer.json through the `tokenizers` library.

transformers would import torch, which this process must not; what it adds for our purpose (chat
templates, special token names) is little, and tests compare both on the same directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from engine_core.types.errors import ConfigError, InvalidRequestError
from services.router.text.chat_template import RENDER_SECONDS, ChatTemplate, TemplateTimeError
from services.router.text.detokenizer import ByteDetokenizer, Detokenizer, PieceDetokenizer, Pieces, WindowDetokenizer
from services.router.text.template_files import DEFAULT, TOOL_USE, templates_of
from services.router.text.token_bytes import Kind, TokenBytes

_INLINE_CHARS = 2048
"""Longer texts are encoded in a thread: about a millisecond of the loop's time."""
_INLINE_SECONDS = 0.02
"""A short chat whose template takes longer is rendered in a thread."""


class RouterTokenizer:
    """Encodes, decodes and renders for one model. Safe to share between requests."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: Mapping[str, ChatTemplate] | None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`templates` by name, as template_files.py finds them."""
        self._backend = backend
        self._templates = dict(templates or {})
        self._special_tokens = special_tokens or {}
        self._pieces: Pieces | None = None
        self.bytes = TokenBytes(backend)
        """What each token stands for."""
        self._vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        spec = json.loads(backend.to_str())
        self._longest_token = 0
        strips = any(t.get("lstrip") or t.get("rstrip") for t in spec.get("added_tokens", ()))
        if self.bytes.byte_level and spec.get("normalizer") is None and not strips:
            # A token stands for at most as many characters as its spelling has.
            self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
        self._bos = self._find_bos()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, directory: str | Path, chat_template: str = "") -> RouterTokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the chat templates; `chat_template` names one of them, one of
        pdmesh's own, or a file.

        Raises ConfigError that names the file when one is missing or damaged.
        """
        root = Path(directory)
        path = root / "tokenizer.json"
        if not root.is_dir():
            raise ConfigError(f"{root} is not a directory", field="model")
        if not path.is_file():
            raise ConfigError(f"{path} is not there; the router needs the model's tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {exc}") from exc
        backend.no_truncation()
        backend.no_padding()
        config = read_json(root / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        return cls(backend, templates_of(root, config, special_tokens, chat_template), special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """False for base models, which take no chats."""
        return DEFAULT in self._templates

    @property
    def template_source(self) -> str:
        """The text of the chat templates, for those who look for a model's marks; empty for base models."""
        return "\n".join(self._templates[name].source for name in (DEFAULT, TOOL_USE) if name in self._templates)

    def has_token(self, text: str) -> bool:
        """True when one token, special or not, is spelled so."""
        return self._backend.token_to_id(text) is not None

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so; None when there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found if found in self.bytes.special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids; takes about 1 ms per 2,000 characters. A text that begins with the BOS gets no other."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_one_bos(ids) if add_special_tokens else ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As encode, but long texts don't hold up the event loop."""
        if len(text) <= _INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, partial(self._encode_batch, text, add_special_tokens=add_special_tokens)
        )

    def _encode_batch(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call lets go of the GIL.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self._with_one_bos(ids) if add_special_tokens else ids

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        return ids[1:] if self._bos is not None and ids[:2] == [self._bos, self._bos] else ids

    def starts(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Where each of a text's tokens begins in it, by what the library says; those that it added have no text."""
        count = len(token_ids)
        for special in (True, False):
            found = self._backend.encode(text, add_special_tokens=special)
            if found.ids[len(found.ids) - count :] == list(token_ids):
                break
        starts, before = [], 0
        for token_id, (start, end) in zip(token_ids, found.offsets[len(found.ids) - count :], strict=False):
            data = self.bytes.of(token_id)
            spaces = len(data) - len(data.lstrip(b" "))
            while spaces and start > before and text[start - 1] == " ":  # byte-level ones are trimmed
                start, spaces = start - 1, spaces - 1  # noqa: PLW2901
            starts.append(start if end > start else before)
            before = max(before, end)
        return starts

    def _find_bos(self) -> int | None:
        """The one token that the tokenizer puts before every text; None when there is none, or several."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        added = len(full) - len(bare)
        before = next((n for n in range(added + 1) if full[n : n + len(bare)] == bare), 0)
        return full[0] if before == 1 else None

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without encoding; 0 when nothing is known."""
        return len(text) // self._longest_token if self._longest_token else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of all tokens at once: what a detokenizer gives in pieces."""
        state = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return state.add(token_ids) + state.flush()

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Returns the vocabulary's own spelling per id."""
        return [self._backend.id_to_token(i) for i in token_ids]

    def detokenizer(
        self, *, skip_special_tokens: bool = True, kept_ids: Collection[int] = (), goes_on: bool = False
    ) -> Detokenizer:
        """Returns the state for one output; special tokens are left out, all but `kept_ids`, or written as they are
        spelled. One that `goes_on` does not begin a text; decoders that look around (Kind.OTHER) can't tell."""
        hidden = self.bytes.special_ids.difference(kept_ids) if skip_special_tokens else frozenset[int]()
        kind = self.bytes.kind
        if kind is Kind.BYTES:
            if hidden and kept_ids:
                of = lambda token_id: b"" if token_id in hidden else self.bytes.of(token_id)  # noqa: E731
            else:
                of = self.bytes.shown if hidden else self.bytes.of
            return ByteDetokenizer(of, strip=0 if goes_on else self.bytes.strip)
        if kind is Kind.PIECES:
            if self._pieces is None:
                self._pieces = Pieces(self._decode_all)
            return PieceDetokenizer(self._pieces, hidden, begun=goes_on)
        return WindowDetokenizer(lambda ids: self._decode_all([i for i in ids if i not in hidden]))

    def _decode_all(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        template: str | None = None,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """Returns the chat as text; encode it with add_special_tokens=False, the template wrote them.

        `template` goes before the model's own, and its tool_use before its default where there are tools. Raises
        InvalidRequestError when there is no template, it refuses, or it takes too long.
        """
        chosen = self._templates.get(TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT)
        if template is not None:
            try:
                chosen = ChatTemplate(template, self._special_tokens)
            except Exception as exc:  # jinja raises many kinds
                message = f"chat_template: cannot be compiled: {exc}"
                raise InvalidRequestError(message, field="chat_template") from exc
        if chosen is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", field="messages")
        return chosen.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            seconds=seconds,
        )

    async def render_chat_async(
        self, messages: Sequence[Mapping[str, Any]], *, seconds: float = RENDER_SECONDS, **options: Any
    ) -> str:
        """As render_chat, but a long chat, or a template that takes its time, doesn't hold up the event loop."""
        size = sum(200 + len(str(message.get("content") or "")) for message in messages)
        if size <= _INLINE_CHARS * 4 and options.get("template") is None:
            with contextlib.suppress(TemplateTimeError):
                return self.render_chat(messages, seconds=_INLINE_SECONDS, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, partial(self.render_chat, messages, seconds=seconds, **options)
        )

    def close(self) -> None:
        """Ends the encoding threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the file's object, empty when there is no file. Raises ConfigError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no object")
    return data


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as template variables; an entry may be text or an added token's object."""
    out = {}
    for key, value in config.items():
        if key.endswith("_token") and not key.startswith("add_"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                out[key] = text
    return out
