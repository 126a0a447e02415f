"""How a chat is asked and how its output is read: what tools, tool choice and reasoning need beyond the messages.

tool_choice   parser of calls           grammar
none          none                      none
auto          of the model's format     where a function is strict: free text, or calls by the schemas
required      of the model's format     calls, by the schemas
a function    the same, that one alone  one call of it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import Grammar
from services.router.chat.output import ParserOf
from services.router.chat.schema import ChatRequest
from services.router.grammar.forced import grammar_of, wants_json
from services.router.parsers.base import OutputParser
from services.router.parsers.choice import NONE, OutputFormat
from services.router.parsers.forcing import MAX_CALLS, Function, after_thoughts, forced_calls, free_calls


class ChatPlan(msgspec.Struct, frozen=True):
    """`grammar` forces the output and goes before what response_format asks for, which is in it; `parser_of` makes the
    parser of each choice's output, and None reads all of it as content."""

    grammar: Grammar | None = None
    parser_of: ParserOf | None = None
    kept_special_ids: tuple[int, ...] = ()
    """Special tokens that the parser needs to see, and takes out of the text."""


def plan_chat(asked: ChatRequest, written: OutputFormat, prompt: str) -> ChatPlan:
    """The plan for a chat that was rendered as `prompt`. Raises InvalidRequestError when this model can't do what the
    client asks for."""
    choice = asked.choice
    functions = [
        Function(tool.function.name, tool.function.parameters, bool(tool.function.strict))
        for tool in asked.tools or ()
        if choice in ("auto", "required", f"function:{tool.function.name}")
    ]
    if functions and written.tools == NONE:
        message = "tools: this server reads no tool calls (--tool-call-parser none); only tool_choice none is possible"
        raise InvalidRequestError(message, field="tools")
    begun = (asked.messages[-1].content or "") if asked.continue_final_message else ""
    inside = written.inside(prompt, begun)
    one = asked.parallel_tool_calls is False or choice.startswith("function:")
    most = 1 if one else asked.max_tool_calls
    names = frozenset(f.name for f in functions) if functions else None
    schemas = {f.name: f.parameters for f in functions if f.parameters is not None}
    answers = choice == "auto" and wants_json(asked)
    make = partial(written.parser, names, schemas=schemas, inside=inside, most=most, answers=answers)
    if make() is None:
        return ChatPlan()
    return ChatPlan(
        _grammar(asked, written, functions, most=most or MAX_CALLS, inside=inside),
        partial(_parser, make),
        written.kept_ids(calls=names is not None),
    )


def _parser(make: partial[OutputParser | None]) -> OutputParser:
    parser = make()
    assert parser is not None  # it was there when the plan was made
    return parser


def _grammar(
    asked: ChatRequest,
    written: OutputFormat,
    functions: Sequence[Function],
    *,
    most: int,
    inside: bool | None,
) -> Grammar | None:
    answer = grammar_of(asked)
    if functions and asked.choice != "auto":
        return forced_calls(written, functions, most=most, inside=inside)
    if functions and (answer is not None or any(f.strict for f in functions)):
        return free_calls(written, functions, most=most, inside=inside, answer=answer)
    return None if answer is None else after_thoughts(written, answer, inside=inside)
