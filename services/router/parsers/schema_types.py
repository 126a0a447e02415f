"""What types a JSON schema allows, for forms of calls that write values without their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Types = frozenset[str]
Known = dict[str, Types | None]
STRING: Types = frozenset({"string"})
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
"""How clients misspell types."""
_DEEPEST = 32
"""Schemas that are nested deeper allow anything."""


def types_of(schema: Any, root: Any, known: Known | None = None, depth: int = 0) -> Types | None:
    """The types of the values that `schema` allows, a part of the schema `root`; None when it does not say.

    `known` are those of references; one dict serves all parts of a root, so that each is followed once.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    known = {} if known is None else known
    found = [_named(schema.get("type"))]
    if isinstance(schema.get("enum"), list):
        found.append(frozenset(map(type_of, schema["enum"])))
    if "const" in schema:
        found.append(frozenset({type_of(schema["const"])}))
    pointer = schema.get("$ref")
    if isinstance(pointer, str):
        if pointer not in known:
            known[pointer] = None  # what refers to itself says no more
            known[pointer] = types_of(referred(pointer, root), root, known, depth + 1)
        found.append(known[pointer])
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            found.append(_any(types_of(part, root, known, depth + 1) for part in schema[several]))
    if isinstance(schema.get("allOf"), list):
        found += [types_of(part, root, known, depth + 1) for part in schema["allOf"]]
    return _all(found)


def types_of_parameter(schema: Mapping[str, Any] | None, name: str) -> Types | None:
    """The types of one of a function's arguments, by the schema of them all; None when it does not say."""
    top: Any = schema
    for _ in range(_DEEPEST):
        if not isinstance(top, Mapping):
            return None
        if "properties" in top or "$ref" not in top:
            break
        top = referred(top["$ref"], schema)
    properties = top.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return types_of(known.get(name, top.get("additionalProperties")), schema)


def type_of(value: Any) -> str:
    """The type of a value that JSON can write; integers are of their own."""
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def type_of_text(text: str) -> str:
    """The type of a value that is written in JSON; any number is a number."""
    kinds = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return kinds.get(text[:1], "number")


def referred(pointer: Any, root: Any) -> Any:
    """What a reference into the same schema stands for; None for one that leads nowhere, or elsewhere."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    for step in pointer[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def _named(found: Any) -> Types | None:
    names = found if isinstance(found, list) else [found]
    known = {_ALIASES.get(name, name) for name in names if isinstance(name, str)}
    return frozenset(known) if known and known <= _TYPES else None


def _any(parts: Iterable[Types | None]) -> Types | None:
    union: Types = frozenset()
    for part in parts:
        if part is None:
            return None
        union |= part
    return union or None


def _all(parts: Iterable[Types | None]) -> Types | None:
    types: Types | None = None
    for part in parts:
        if part is not None:
            types = part if types is None else _both(types, part)
    return types


def _both(one: Types, other: Types) -> Types:
    """An integer is a number, too."""
    wide = [t | {"integer"} if "number" in t else t for t in (one, other)]
    return (wide[0] & wide[1]) or one
