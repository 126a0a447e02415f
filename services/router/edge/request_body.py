"""The body of a request, from bytes to a checked object.

Fields that we act on are typed and bounded; null is as absent. Fields that change the output and that we don't
have are accepted with the value that changes nothing and refused with any other, by name and with a reason.
What is unknown is ignored, as OpenAI's clients expect. Every refusal is an InvalidRequestError with `field` set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from engine_core.types.errors import InvalidRequestError
from services.router.edge.fields import Strict
from services.router.edge.json_body import parse_json, short

_Neutral = Callable[[Any], bool]
Refused = Mapping[str, tuple[_Neutral, str]]
"""Fields with the values that change nothing, and why no other is taken."""


def one_of(*values: Any) -> _Neutral:
    """These values, and null."""
    return lambda v: v is None or any(v == n and isinstance(v, bool) == isinstance(n, bool) for n in values)


def first_refused(fields: Refused, data: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first of these fields that has a value which is not taken, with the reason."""
    return next(((name, why) for name, (takes, why) in fields.items() if not takes(data.get(name))), None)


class RequestBody(Strict):
    """What a path takes. Each kind says what is its own."""

    @classmethod
    def unfolded(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body that may hold some of them in a part of their own."""
        return data

    @classmethod
    def refusal(cls, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """The first field that this kind does not take as it is, with the reason; None when there is none."""
        return None

    def check(self) -> None:
        """Raises InvalidRequestError for fields that contradict each other."""


BodyT = TypeVar("BodyT", bound=RequestBody)


def parse_request(kind: type[BodyT], body: bytes, served: Sequence[str] = ()) -> BodyT:
    """Reads a body, where models are served under these names. Raises InvalidRequestError with the field at fault."""
    data = kind.unfolded(parse_json(body))
    refused = kind.refusal(data)
    if refused is not None:
        name, reason = refused
        raise InvalidRequestError(f"{name}: {short(data[name])} is not supported: {reason}", field=name)
    model = kind.model_fields.get("model")
    if model is not None and model.is_required() and data.get("model") in (None, ""):
        there = f"; this server has {', '.join(map(repr, served))} ('default' works for any)" if served else ""
        raise InvalidRequestError(f"model: required{there}", field="model")
    try:
        request = kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as exc:
        raise _first_error(exc) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    request.check()
    return request


def body_of(kind: type[object]) -> dict[str, object]:
    """The request body for /openapi.json; openapi.py adds the schemas."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _first_error(exc: ValidationError) -> InvalidRequestError:
    error = exc.errors(include_url=False, include_context=False)[0]
    name = ""
    for part in error["loc"]:
        if isinstance(part, str) and part.partition("[")[0] in _UNION_PARTS:
            continue  # the name of a type, not of a key
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] in ("missing", "value_error") else f", got {short(error.get('input'))}"
    return InvalidRequestError(f"{name}: {message}{got}", field=name)


_UNION_PARTS = frozenset({"dict", "str", "bool"})
"""How pydantic names the members of our unions in the place of an error."""
