"""How a chat is asked and how its output is read: what tools, tool choice and reasoning need beyond the messages."""

from __future__ import annotations

import msgspec

from engine_core.types.sampling import Grammar
from services.router.chat_output import ParserOf
from services.router.chat_schema import ChatRequest


class ChatPlan(msgspec.Struct, frozen=True):
    """`grammar` forces the output and goes before what response_format asks for; `parser_of` makes the parser of each
    choice's output, and None reads all of it as content."""

    grammar: Grammar | None = None
    parser_of: ParserOf | None = None
    kept_special_ids: tuple[int, ...] = ()
    """Special tokens that the parser needs to see, and takes out of the text."""


def plan_chat(asked: ChatRequest, prompt: str) -> ChatPlan:
    """The plan for a chat that was rendered as `prompt`. Raises InvalidRequestError when this model can't do what the
    client asks for."""
    return ChatPlan()
