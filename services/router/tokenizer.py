"""The router's tokenizer: a model directory's tokenizer.json through the `tokenizers` library.

transformers would import torch, which this process must not; what it adds for our purpose (chat
templates, special token names) is little, and tests compare both on the same directories.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from engine_core.types.errors import ConfigError, InvalidRequestError
from services.router.chat_template import ChatTemplate
from services.router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from services.router.token_bytes import TokenBytes

_INLINE_CHARS = 2048
"""Longer texts are encoded in a thread: about a millisecond of the loop's time."""


class RouterTokenizer:
    """Encodes, decodes and renders for one model. Safe to share between requests."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._template = template
        self._special_tokens = special_tokens or {}
        self.bytes = TokenBytes(backend)
        """What each token stands for."""
        self._vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        spec = json.loads(backend.to_str())
        self._longest_token = 0
        strips = any(t.get("lstrip") or t.get("rstrip") for t in spec.get("added_tokens", ()))
        if self.bytes.byte_level and spec.get("normalizer") is None and not strips:
            # A token stands for at most as many characters as its spelling has.
            self._longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, directory: str | Path) -> RouterTokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja.

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
        source = _template_source(root, config)
        try:
            template = ChatTemplate(source, _special_tokens(config)) if source else None
        except Exception as exc:  # jinja raises many kinds
            raise ConfigError(f"the chat template of {root} cannot be compiled: {exc}") from exc
        return cls(backend, template, _special_tokens(config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """False for base models, which take no chats."""
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template's text; empty for base models."""
        return "" if self._template is None else self._template.source

    def has_token(self, text: str) -> bool:
        """True when one token, special or not, is spelled so."""
        return self._backend.token_to_id(text) is not None

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so; None when there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found if found in self.bytes.special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids; takes about 1 ms per 2,000 characters."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

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
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, without encoding; 0 when nothing is known."""
        return len(text) // self._longest_token if self._longest_token else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of all tokens at once."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Returns the vocabulary's own spelling per id."""
        return [self._backend.id_to_token(i) for i in token_ids]

    def detokenizer(self, *, skip_special_tokens: bool = True, kept_ids: Collection[int] = ()) -> Detokenizer:
        """Returns the state for one output; special tokens are left out, all but `kept_ids`, or written as they are
        spelled."""
        hidden = self.bytes.special_ids.difference(kept_ids) if skip_special_tokens else frozenset[int]()
        if self.bytes.byte_level:
            if hidden and kept_ids:
                return ByteDetokenizer(lambda token_id: b"" if token_id in hidden else self.bytes.of(token_id))
            return ByteDetokenizer(self.bytes.shown if hidden else self.bytes.of)
        return WindowDetokenizer(
            lambda ids: self.decode([i for i in ids if i not in hidden], skip_special_tokens=False)
        )

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
    ) -> str:
        """Returns the chat as text; encode it with add_special_tokens=False, the template wrote them.

        `template` goes before the model's own; it must be trusted: it can take any time. Raises InvalidRequestError
        when there is no template, or it refuses.
        """
        chosen = self._template
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


def _template_source(root: Path, config: Mapping[str, Any]) -> str | None:
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates by name
        found = {t["name"]: t["template"] for t in found if "name" in t and "template" in t}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as template variables; an entry may be text or an added token's object."""
    out = {}
    for key, value in config.items():
        if key.endswith("_token") and not key.startswith("add_"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                out[key] = text
    return out
