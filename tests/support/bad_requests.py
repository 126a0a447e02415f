"""Requests that are wrong, by kind, and HTTP written by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.mesh import Mesh

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ROUTES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "default", "prompt": "hi"},
    CHAT: {"model": "default", "messages": [{"role": "user", "content": "hi"}]},
    GENERATE: {"text": "hi"},
}
VOCABULARY = 325
"""Of a tiny model."""

ABSURD: dict[str, list[Any]] = {
    "model": [3, True, ["default"], {}],
    "max_tokens": [0, -1, -(10**30), "5", 1.5, 2**31, 10**30, True, [1], {}],
    "min_tokens": [-1, 2**31, "1"],
    "temperature": [-0.1, 2.1, 1e308, -1e308, "hot", True, []],
    "top_p": [-1, 1.01, "x", 10**40],
    "top_k": [-2, 1.5, 2**40, "x"],
    "min_p": [-0.5, 2, {}],
    "seed": [2**64, -(2**63) - 1, "x", 1.5],
    "n": [0, -1, 129, 1000, 10**12, "2", 1.0],
    "stop": ["", ["a", ""], [str(i) for i in range(17)], 5, ["a", 3], [["a"]], {"a": 1}],
    "stop_token_ids": [[-1], ["a"], [2**31], [True], [1.0], 5, "x"],
    "stream_options": ["x", 1, {"include_usage": "yes"}],
    "ignore_eos": ["no", 1],
    "cache_salt": ["x" * 257, 5],
    "user": [5, {}],
    "return_token_ids": [2, "true"],
    "add_special_tokens": ["x", 0],
    "frequency_penalty": [-2.1, 2.5, "x", True],
    "presence_penalty": [3, -(10**30)],
    "repetition_penalty": [0, -1, 10.5, "x"],
    "logit_bias": [[5], {"x": 1}, {"05": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {str(VOCABULARY): 1}],
    "logprobs": [-1, 21, "x", 1.5, {}],
    "prompt_logprobs": [-1, 21, True],
    "include_stop_str_in_output": ["x", 1],
    "skip_special_tokens": ["no", 0],
    "return_tokens_as_token_ids": [1],
    "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}],
    "guided_choice": [[], "a"],
    "guided_json": [5, True],
    "guided_regex": [5],
    "guided_grammar": [{}],
    "structured_outputs": ["x", {"choice": []}],
    "timeout": [0, -1, 1e9, "x"],
    "priority": ["high", 1.5],
    "metadata": ["x"],
    "store": ["x"],
    "service_tier": [5],
    # What we don't have is refused unless it changes nothing.
    "suffix": ["x"],
    "functions": [[{"name": "f"}]],
    "length_penalty": [0.5],
    "use_beam_search": [True],
    "bad_words": [["x"]],
    "allowed_token_ids": [[5]],
    "truncate_prompt_tokens": [5],
}
"""Values that no route takes, by field."""

PROMPTS: list[Any] = [
    "", [], [[]], [""], ["a", ""], [[5], []], None, 5, 1.5, True, {"a": 1}, [None], [{}], [1, "a"], ["a", 1], [1.5],
    [-1], [True, False], [[1], [True]], [[1], "a", [-3]], [[[1]]], [VOCABULARY], [[5], [VOCABULARY]], [2**31], [2**70],
    ["a"] * 257, [[5]] * 257,
]  # fmt: skip
MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("hi", "messages"),
    ({}, "messages"),
    ([5], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
]
GENERATES: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": ""}, "text"),
    ({"text": 5}, "text"),
    ({"text": "a", "token_ids": [5]}, "text"),
    ({"token_ids": [-1]}, "token_ids"),
    ({"token_ids": [True]}, "token_ids"),
    ({"token_ids": "x"}, "token_ids"),
    ({"token_ids": [VOCABULARY]}, "token_ids"),
    ({"input_ids": [2**31]}, "input_ids"),
    ({"text": "a", "n": 2}, "n"),
    ({"text": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ({"text": "a", "sampling_params": "x"}, "sampling_params"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
]
"""Bodies of /generate, each with the field at fault."""

BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"hello", None),
    (b"\x00\x01\x02", None),
    (b"[]", None),
    (b'"x"', None),
    (b"null", None),
    (b"{'prompt': 'hi'}", None),
    (b'{"model": "default", "prompt": "hi"', None),
    (b'{"model": "default", "prompt": "hi",}', None),
    (b'{"model": "default", "prompt": "hi"} {}', None),
    (b'{"model": "default", "prompt": "a\nb"}', None),
    (b'\xef\xbb\xbf{"prompt": "hi"}', None),
    ('{"model": "default", "prompt": "hi"}'.encode("utf-16"), None),
    (b'{"pro\xffmpt": "hi"}', None),
    (b'{"model": "default", "prompt": "hi", "temperature": NaN}', "temperature"),
    (b'{"model": "default", "prompt": "hi", "top_p": -Infinity}', "top_p"),
    (b'{"model": "default", "prompt": "hi", "min_p": 1e999}', "min_p"),
    (b'{"model": "default", "prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
    (b'{"model": "default", "prompt": "h\xff\xfe"}', "prompt"),
    (b'{"model": "default", "prompt": "\xc0\xaf"}', "prompt"),
    (b'{"model": "default", "prompt": "\xed\xa0\x80"}', "prompt"),
    (b'{"model": "default", "prompt": ["a", "\\ud800"]}', "prompt[1]"),
    (b'{"model": "default", "prompt": "hi", "max_tokens": 2, "max_tokens": 0}', "max_tokens"),  # the last counts
    (b'{"model": "default", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    (b'{"model": "default", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt"),
    (b'{"model": "default", "prompt": ' + b'{"a":' * 900 + b"1" + b"}" * 901, "prompt"),
]
"""Bodies of /v1/completions, each with the field at fault where that can be told."""

_TIMEOUT = 20.0
GOOD = b'{"model": "default", "prompt": "hi", "max_tokens": 1}'


def head(*lines: str, length: int | None = None) -> bytes:
    own = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
    if length is not None:
        own.append(f"Content-Length: {length}")
    return ("\r\n".join(own) + "\r\n\r\n").encode()


class Wire:
    """One connection to the router."""

    def __init__(self, mesh: Mesh) -> None:
        self._port = int(mesh.url.rpartition(":")[2])

    async def __aenter__(self) -> Wire:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()

    async def send(self, *parts: bytes) -> None:
        """Each part in a packet of its own, most likely."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            await asyncio.sleep(0.01)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next response."""
        async with asyncio.timeout(_TIMEOUT):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(lines[0].split()[1]), headers, body
