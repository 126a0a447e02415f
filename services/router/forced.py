"""Which grammar a request names: response_format, the guided fields, structured_outputs. One at most."""

from __future__ import annotations

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import Grammar
from services.router.sampling_schema import SamplingRequest, StructuredOutputs

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def named_grammars(asked: SamplingRequest) -> list[str]:
    """The fields of the request that force the output's form."""
    found = [name for name in _GUIDED if getattr(asked, name) is not None]
    if asked.response_format is not None and asked.response_format.type != "text":
        found.append("response_format")
    wanted = asked.structured_outputs or StructuredOutputs()
    inner = {"json": wanted.json_, "regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    found += [f"structured_outputs.{name}" for name, value in inner.items() if value is not None]
    if wanted.json_object:
        found.append("structured_outputs.json_object")
    return found


def grammar_of(asked: SamplingRequest) -> Grammar | None:
    """The grammar; None leaves the output free. Raises InvalidRequestError."""
    named = named_grammars(asked)
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequestError(f"{named[1]}: not together with {named[0]}", field=named[1])
    raise InvalidRequestError(f"{named[0]}: forced forms are not built yet", field=named[0])
