"""JSON schemas of growing difficulty, for outputs that have to follow them."""

from __future__ import annotations

from typing import Any

_NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
_TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
    },
    "required": ["name", "children"],
    "additionalProperties": False,
}
_EXPRESSION = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 99},
        {
            "type": "object",
            "properties": {
                "op": {"enum": ["+", "-", "*"]},
                "left": {"type": "integer", "minimum": 0, "maximum": 9},
                "right": {"$ref": "#/$defs/expression"},
            },
            "required": ["op", "left", "right"],
            "additionalProperties": False,
        },
    ]
}


def _object(**properties: Any) -> dict[str, Any]:
    """An object of just these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}

SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "const": {"const": {"a": [1, "é", None], 'b"\\': True}},
    "enum of texts": {"enum": ["red", "green", 'blue "sky"', "ünïcode 😀"]},
    "enum of all kinds": {"enum": [1, 2.5, None, True, "x", [1], {"k": 0}]},
    "integer in a range": {"type": "integer", "minimum": -40, "maximum": 1200},
    "exclusive borders": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 10},
    "multiple of": {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 5},
    "number in a range": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "text of bounded length": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}(/[a-f]{1,3})?$"},
    "pattern somewhere": {"type": "string", "pattern": "b[0-9]", "maxLength": 10},
    "date": {"type": "string", "format": "date"},
    "time of a day": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "several types": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
    "list of bounded length": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 2,
        "maxItems": 6,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [_WORD, {"type": "boolean"}, {"enum": [1, 2]}],
        "items": False,
        "minItems": 3,
    },
    "tuple with a tail": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {"const": "x"},
        "minItems": 2,
        "maxItems": 5,
    },
    "list of lists": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "minItems": 1,
        "maxItems": 3,
    },
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "object": _object(name=_WORD, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "all optional": {**_object(a={"type": "boolean"}, b={"type": "null"}, c=_WORD), "required": []},
    "some optional": {**_object(a={"type": "boolean"}, b=_WORD, c={"enum": [0]}), "required": ["b"]},
    "map of one kind": {
        "type": "object",
        "patternProperties": {"^[a-c]{1,4}$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
    },
    "nested four deep": _object(a=_object(b=_object(c=_object(d={"type": "array", "items": _WORD, "maxItems": 2})))),
    "list of objects": {
        "type": "array",
        "items": _object(id={"type": "integer", "minimum": 1, "maximum": 999}, tag={"enum": ["x", "y", "z"]}),
        "minItems": 2,
        "maxItems": 4,
    },
    "any of scalars": {
        "anyOf": [{"type": "integer", "minimum": 5, "maximum": 60}, {"const": "none"}, {"type": "null"}]
    },
    "any of objects": {
        "anyOf": [
            _object(kind={"const": "circle"}, radius={"type": "integer", "minimum": 1, "maximum": 9}),
            _object(kind={"const": "square"}, side={"type": "integer", "minimum": 1, "maximum": 9}),
        ]
    },
    "nullable field": _object(nick={"anyOf": [_WORD, {"type": "null"}]}, ok={"type": "boolean"}),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"maximum": 12}}, "additionalProperties": False},
        ]
    },
    "references": {
        **_object(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
        "$defs": {"place": _object(city=_WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"})},
    },
    "reference to a reference": {
        **_object(first={"$ref": "#/$defs/a"}),
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["deep", "deeper"]}},
    },
    "linked list": {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    "thin tree": {"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}},
    "expression": {"$ref": "#/$defs/expression", "$defs": {"expression": _EXPRESSION}},
    "tagged union in a list": {
        "type": "array",
        "items": {
            "oneOf": [
                _object(type={"const": "move"}, by={"type": "integer", "minimum": -5, "maximum": 5}),
                _object(type={"const": "say"}, text={"type": "string", "maxLength": 8}),
                _object(type={"const": "stop"}),
            ]
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "names to be escaped": _object(**{'quo"te': {"type": "boolean"}, "back\\slash": {"const": 1}, "é 😀": _WORD}),
    "an order": {
        **_object(
            id={"type": "string", "format": "uuid"},
            customer=_object(name=_WORD, email={"type": "string", "pattern": "^[a-z]{1,6}@[a-z]{1,6}\\.org$"}),
            lines={"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 3},
            state={"enum": ["open", "paid", "sent"]},
            note={"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
        ),
        "$defs": {
            "line": _object(
                sku={"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"},
                count={"type": "integer", "minimum": 1, "maximum": 20},
                price={"type": "number", "minimum": 0, "maximum": 999, "multipleOf": 0.25},
            )
        },
    },
}
