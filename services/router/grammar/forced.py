"""Which grammar a request names: response_format, the guided fields, structured_outputs. One at most."""

from __future__ import annotations

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import Grammar
from services.router.grammar import forms as grammar
from services.router.sampling_schema import SamplingRequest, StructuredOutputs

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OF_JSON = frozenset({"response_format", "guided_json", "structured_outputs.json", "structured_outputs.json_object"})


def named_grammars(asked: SamplingRequest) -> list[str]:
    """The fields of the request that force the output's form."""
    found = [name for name in _GUIDED if getattr(asked, name) is not None]
    if asked.response_format is not None and asked.response_format.type != "text":
        found.append("response_format")
    wanted = asked.structured_outputs or StructuredOutputs()
    inner = {
        "json": wanted.json_,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "structural_tag": wanted.structural_tag,
    }
    found += [f"structured_outputs.{name}" for name, value in inner.items() if value is not None]
    if wanted.json_object:
        found.append("structured_outputs.json_object")
    return found


def wants_json(asked: SamplingRequest) -> bool:
    """True when the output has to be JSON."""
    return any(name in _OF_JSON for name in named_grammars(asked))


def grammar_of(asked: SamplingRequest) -> Grammar | None:
    """The grammar; None leaves the output free. Raises InvalidRequestError."""
    named = named_grammars(asked)
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequestError(f"{named[1]}: not together with {named[0]}", field=named[1])
    field = named[0]
    if asked.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos: not together with {field}, which says where the output ends", field="ignore_eos"
        )
    wanted = asked.structured_outputs or StructuredOutputs()
    match field:
        case "response_format":
            return _of_format(asked)
        case "guided_json" | "structured_outputs.json":
            return grammar.json_schema(wanted.json_ if asked.guided_json is None else asked.guided_json, field)
        case "guided_regex" | "structured_outputs.regex":
            return grammar.regex(asked.guided_regex or wanted.regex or "", field)
        case "guided_choice" | "structured_outputs.choice":
            return grammar.choice(asked.guided_choice or wanted.choice or (), field)
        case "guided_grammar" | "structured_outputs.grammar":
            return grammar.context_free(asked.guided_grammar or wanted.grammar or "", field)
        case "structured_outputs.structural_tag":
            return grammar.structural_tag(wanted.structural_tag or "", field)
    return grammar.json_object()


def _of_format(asked: SamplingRequest) -> Grammar:
    wanted = asked.response_format
    assert wanted is not None
    if wanted.json_schema is None or wanted.type == "json_object":
        return grammar.json_object()
    strict = wanted.json_schema.strict is True
    return grammar.json_schema(wanted.json_schema.schema_, "response_format.json_schema.schema", strict=strict)
