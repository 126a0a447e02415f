"""Which parsers read the outputs of this router's model: by name, or by what its chat template and vocabulary show.

A family's marks are often special tokens, which the detokenizer leaves out: a format knows those that must stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any, Protocol

import msgspec

from engine_core.types.errors import ConfigError
from services.router.parsers import (
    bare_json,
    deepseek_v3,
    harmony,
    hermes,
    json_lists,
    kimi_k2,
    mistral,
    pythonic,
    tagged,
    think,
)
from services.router.parsers.bare_json import BareJsonParser
from services.router.parsers.base import OutputParser, Part, Source, ToolCallArguments, ToolCallBegin
from services.router.parsers.call_object import Tools
from services.router.parsers.deepseek_v3 import DeepSeekV3Parser
from services.router.parsers.harmony import HarmonyParser
from services.router.parsers.hermes import HermesParser
from services.router.parsers.json_lists import JsonListParser
from services.router.parsers.kimi_k2 import KimiK2Parser
from services.router.parsers.mistral import MistralParser
from services.router.parsers.pythonic import PythonicParser
from services.router.parsers.reader import SteppedParser, Steps
from services.router.parsers.tagged import TaggedParser
from services.router.parsers.think import ReasoningFirst, ThinkParser
from services.router.text.chat_habits import knows_tools
from services.router.text.plain_tools import DEEPSEEK, DEEPSEEK_FENCED, form_of

AUTO, NONE = "auto", "none"
GPT_OSS = "gpt_oss"
_SAME = {"qwen": "hermes", "qwen3_xml": "qwen3_coder", "deepseek_v31": "deepseek_v3", "qwen3": "deepseek_r1"}
"""Two names of one format."""
_NEWER = frozenset({"deepseek_v31"})
"""Names that say which of a family's two forms it is."""

_TOOL_MARKS: Mapping[str, tuple[str, ...]] = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3_json": (bare_json.PYTHON_TAG,),
    "mistral": (mistral.CALLS, mistral.ARGS, mistral.CALL_ID),
    "deepseek_v3": (
        deepseek_v3.CALLS,
        deepseek_v3.CALLS_END,
        deepseek_v3.CALL,
        deepseek_v3.CALL_END,
        deepseek_v3.SEP,
    ),
    "kimi_k2": kimi_k2.MARKS,
    "pythonic": (*pythonic.MARKS, *pythonic.LFM2),
    **{family: tags.special for family, tags in tagged.FAMILIES.items()},
    **{family: marks.special for family, marks in json_lists.FAMILIES.items()},
    GPT_OSS: harmony.MARKS,
    "json": (),
    NONE: (),
}
_REASONING_MARKS: Mapping[str, tuple[str, ...]] = {
    "deepseek_r1": think.THINK,
    "mistral": think.MISTRAL,
    GPT_OSS: harmony.MARKS,
    NONE: (),
}
TOOL_PARSERS = tuple(sorted({*_TOOL_MARKS, *(name for name, same in _SAME.items() if same in _TOOL_MARKS)} - {NONE}))
REASONING_PARSERS = tuple(sorted({*_REASONING_MARKS, "qwen3"} - {NONE}))


class Vocabulary(Protocol):
    """What a format needs to know of a tokenizer."""

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so; None when there is none."""

    def has_token(self, text: str) -> bool:
        """True when one token, special or not, is spelled so."""


class OutputFormat(msgspec.Struct, frozen=True):
    """How a model writes calls and thoughts. `variant` is the newer of two forms that a family may have."""

    tools: str = NONE
    reasoning: str = NONE
    variant: bool = False
    special: Mapping[str, int] = {}
    """Marks that are special tokens, with their ids."""

    @property
    def thinks(self) -> bool:
        """True when outputs may hold thoughts."""
        return self.reasoning != NONE

    @property
    def marks(self) -> tuple[str, str]:
        """What stands before and after a thought, where that is all there is to it."""
        return think.MISTRAL if self.reasoning == "mistral" else think.THINK

    def kept_ids(self, *, calls: bool) -> tuple[int, ...]:
        """Special tokens that the parser needs to see."""
        wanted = _REASONING_MARKS[self.reasoning] + (_TOOL_MARKS[self.tools] if calls else ())
        return tuple(sorted({self.special[mark] for mark in wanted if mark in self.special}))

    def inside(self, prompt_end: str, begun: str = "") -> bool | None:
        """Whether a prompt that ends so has begun a thought; None when the output may begin one itself. `begun` is the
        text of the answer that the prompt ends with, where the output goes on with one."""
        if self.reasoning in (NONE, GPT_OSS):
            return None
        end = prompt_end.rstrip()
        opening, closing = self.marks
        if begun.rfind(opening) > begun.rfind(closing):
            return True
        return True if end.endswith(opening) else False if end.endswith(closing) else None

    def parser(
        self,
        names: Collection[str] | None,
        *,
        schemas: Mapping[str, Mapping[str, Any]] = {},
        inside: bool | None = None,
        most: int | None = None,
        answers: bool = False,
    ) -> OutputParser | None:
        """The parser of one output; None when all of it is content.

        `names` are the functions that may be called, None for an output without tools; `schemas` those of their
        arguments, for forms that write no types. Calls beyond `most` are left out. With `answers` an output is either
        calls or an answer in JSON, which may quote calls.
        """
        if self.reasoning == GPT_OSS or (self.tools == GPT_OSS and names is not None):
            tools = None if names is None or self.tools != GPT_OSS else Tools(names)
            parser: OutputParser = HarmonyParser(tools, reasoning=self.reasoning == GPT_OSS)
        else:
            calls: OutputParser | None = None if names is None else _calls(self.tools, Tools(names, schemas))
            if calls is not None and answers:
                calls = CallsOrAnswer(calls, _opens(self.tools))
            if not self.thinks or inside is False:
                if calls is None:
                    return None
                parser = calls
            else:
                thoughts = ThinkParser(self.marks, inside=bool(inside))
                parser = ReasoningFirst(thoughts, calls or _AllContent())
        return parser if most is None or names is None else FirstCalls(parser, most)


class _AllContent(SteppedParser):
    def read(self) -> Steps[None]:
        """See SteppedParser."""
        yield from ()


class CallsOrAnswer:
    """What begins as calls do is read as such; anything else is content to its end."""

    def __init__(self, calls: OutputParser, opens: Sequence[str]) -> None:
        self._calls, self._opens = calls, opens
        self._begun = ""
        """What does not tell yet."""
        self._chosen: OutputParser | None = None
        self.sources: list[Source] = []

    def push(self, text: str) -> list[Part]:
        """See OutputParser."""
        if self._chosen is None:
            self._begun += text
            found = self._begun.lstrip(" \t\r\n")
            if any(opening.startswith(found) and opening != found for opening in self._opens):
                self.sources = []
                return []
            self._chosen = self._calls if found.startswith(tuple(self._opens)) else _AllContent()
            text, self._begun = self._begun, ""
        parts = self._chosen.push(text)
        self.sources = [*self._chosen.sources]
        return parts

    def finish(self) -> list[Part]:
        """See OutputParser."""
        chosen = self._chosen or self._calls
        parts, sources = chosen.push(self._begun), [*chosen.sources]
        parts += chosen.finish()
        self.sources = [*sources, *chosen.sources]
        return parts


class FirstCalls:
    """Leaves out all calls but the first ones."""

    def __init__(self, parser: OutputParser, most: int) -> None:
        self._parser, self._most = parser, most
        self.sources: list[Source] = []

    def push(self, text: str) -> list[Part]:
        """See OutputParser."""
        return self._first(self._parser.push(text))

    def finish(self) -> list[Part]:
        """See OutputParser."""
        return self._first(self._parser.finish())

    def _first(self, parts: list[Part]) -> list[Part]:
        kept = [not isinstance(p, ToolCallBegin | ToolCallArguments) or p.index < self._most for p in parts]
        self.sources = [*compress(self._parser.sources, kept)]
        return [*compress(parts, kept)]


def _opens(family: str) -> tuple[str, ...]:
    """What a family's calls begin with."""
    if family in tagged.FAMILIES:
        return tagged.FAMILIES[family].opens
    if family in json_lists.FAMILIES:
        return (json_lists.FAMILIES[family].opening or "[",)
    return {
        "hermes": (hermes.OPEN,),
        "mistral": (mistral.CALLS,),
        "deepseek_v3": (deepseek_v3.CALLS,),
        "kimi_k2": (kimi_k2.CALLS,),
        "pythonic": (pythonic.START, pythonic.LFM2[0], "["),
        "llama3_json": (bare_json.PYTHON_TAG, "{"),
    }.get(family, ("{",))


def _calls(family: str, tools: Tools) -> SteppedParser | None:
    match family:
        case "hermes":
            return HermesParser(tools)
        case "llama3_json":
            return BareJsonParser(tools, tag=bare_json.PYTHON_TAG, separator=";")
        case "json":
            return BareJsonParser(tools)
        case "mistral":
            return MistralParser(tools)
        case "deepseek_v3":
            return DeepSeekV3Parser(tools)
        case "kimi_k2":
            return KimiK2Parser(tools)
        case "pythonic":
            return PythonicParser(tools)
    if family in json_lists.FAMILIES:
        return JsonListParser(tools, json_lists.FAMILIES[family])
    return TaggedParser(tools, tagged.FAMILIES[family]) if family in tagged.FAMILIES else None


def choose_format(tools: str, reasoning: str, template: str, vocabulary: Vocabulary) -> OutputFormat:
    """The format by the options' names and, for auto, by the chat template's text and the vocabulary.

    Raises ConfigError for an unknown name, and for two that do not fit together.
    """
    _check(tools, TOOL_PARSERS, "tool_call_parser")
    _check(reasoning, REASONING_PARSERS, "reasoning_parser")
    name = tools
    asked_tools, asked_reasoning = _SAME.get(tools, tools), _SAME.get(reasoning, reasoning)
    tools, reasoning = asked_tools, asked_reasoning
    if tools == AUTO:
        tools = GPT_OSS if reasoning == GPT_OSS else _tools_of(template, vocabulary)
    if reasoning == AUTO:
        reasoning = GPT_OSS if tools == GPT_OSS else _reasoning_of(template, vocabulary)
        reasoning = NONE if reasoning == GPT_OSS and tools not in (GPT_OSS, NONE) else reasoning
    elif tools == GPT_OSS and asked_tools == AUTO and reasoning not in (GPT_OSS, NONE):
        tools = "json"
    if GPT_OSS in (tools, reasoning) and len({tools, reasoning} - {NONE}) > 1:
        raise ConfigError(
            f"gpt_oss reads calls and reasoning together: it cannot stand beside the tool call parser {tools!r} "
            f"and the reasoning parser {reasoning!r}",
            field="reasoning_parser",
        )
    marks = {*_TOOL_MARKS[tools], *_REASONING_MARKS[reasoning]}
    special = {mark: found for mark in marks if (found := vocabulary.special_id(mark)) is not None}
    newer = name in _NEWER or _is_newer(tools, template, vocabulary)
    return OutputFormat(tools, reasoning, newer, special)


def _check(name: str, known: Collection[str], field: str) -> None:
    if name not in (*known, AUTO, NONE):
        raise ConfigError(f"{field}: {name!r} is unknown; there is {', '.join((AUTO, NONE, *known))}", field=field)


def _tools_of(template: str, vocabulary: Vocabulary) -> str:
    """The family by its marks; `json` for models that show none. Tokenizers keep the marks of older models: what the
    template shows goes first. A template without tools asks for calls in a form of plain_tools.py's."""
    asks_in_words = bool(template) and not knows_tools(template)
    marked = (
        (GPT_OSS, harmony.CHANNEL),
        ("deepseek_v32", tagged.DSML),
        ("deepseek_v3", deepseek_v3.CALLS),
        ("kimi_k2", kimi_k2.CALLS),
        ("minimax_m2", tagged.MINIMAX_M2.opens[0]),
        ("mistral", mistral.CALLS),
        ("pythonic", pythonic.LFM2[0]),
    )
    for shows in (template.__contains__, vocabulary.has_token):
        for family, mark in marked:
            if shows(mark) and (family == GPT_OSS or not asks_in_words):
                return family
    if asks_in_words:
        return "deepseek_v3" if form_of(template) in (DEEPSEEK, DEEPSEEK_FENCED) else "json"
    for family, shown in json_lists.SHOWN.items():
        if shown in template:
            return family
    if hermes.OPEN in template:
        if tagged.GLM45.key in template:
            return "glm45"
        if tagged.QWEN3_CODER.head not in template and tagged.MINIMAX_M2.head not in template:
            return "hermes"
        if tagged.QWEN3_CODER.key in template:
            return "qwen3_coder"
    if pythonic.SHOWN in template:
        return "pythonic"
    llama = '"parameters": ' in template and "Environment: ipython" in template
    if (llama or bare_json.PYTHON_TAG in template) and tagged.QWEN3_CODER.head not in template:
        return "llama3_json"
    return "json"


def _reasoning_of(template: str, vocabulary: Vocabulary) -> str:
    if harmony.CHANNEL in template or vocabulary.has_token(harmony.CHANNEL):
        return GPT_OSS
    if think.MISTRAL[0] in template or vocabulary.has_token(think.MISTRAL[0]):
        return "mistral"
    if think.THINK[1] in template or vocabulary.has_token(think.THINK[1]):
        return "deepseek_r1"
    return NONE


def _is_newer(tools: str, template: str, vocabulary: Vocabulary) -> bool:
    """Mistral's calls with [ARGS], DeepSeek's without fences, V4's other name for calls, GLM's without line breaks,
    LFM2's marks around Python's form."""
    match tools:
        case "mistral":
            return mistral.ARGS in template or vocabulary.has_token(mistral.ARGS)
        case "deepseek_v3":
            return deepseek_v3.CALLS in template and "```json" not in template
        case "deepseek_v32":
            return "tool_calls>" in template and "function_calls>" not in template  # they may be put together
        case "glm45":
            return any(mark in template for mark in tagged.GLM_UNBROKEN)
        case "pythonic":
            return pythonic.LFM2[0] in template or vocabulary.has_token(pythonic.LFM2[0])
    return False
