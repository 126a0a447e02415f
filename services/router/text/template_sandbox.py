"""Where chat templates run: jinja as transformers sets it up, and within bounds of time and size.

The environment is the same: jinja's immutable sandbox with trimmed blocks, loop controls, the `generation` tag, and the
helpers raise_exception, strftime_now, tojson, dict and namespace. Each turn of a loop and each call of a macro asks the
render's Budget, so that no template runs for ever; multiplication and powers are held to sizes that texts have.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 16 * 1024 * 1024
"""Of a rendered chat: twice the largest request body."""
_MAX_NUMBER = 2**64
_ASK = "__pdmesh_budget"
"""The variable by which loops ask the Budget."""


class BudgetError(jinja2.exceptions.TemplateError):
    """The template took too long, or wrote too much. `time` tells which."""

    def __init__(self, message: str, *, time: bool) -> None:
        super().__init__(message)
        self.time = time


class Budget:
    """How long a render may take, from now on. Called by the template's loops."""

    __slots__ = ("_deadline", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def __call__(self) -> str:
        """Nothing, as text. Raises BudgetError when the time is over."""
        if time.monotonic() > self._deadline:
            raise BudgetError(f"it takes longer than {self.seconds:g} s", time=True)
        return ""


class Environment(ImmutableSandboxedEnvironment):
    """What templates are compiled in."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.filters["tojson"] = to_json
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        found: Iterable[Any] = tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock))
        for node in list(found):
            asked = jinja2.nodes.Call(jinja2.nodes.Name(_ASK, "load"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(asked).set_lineno(node.lineno))
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**`, where what comes of it is no larger than a text or a number may be."""
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_CHARS:
                raise BudgetError(f"it repeats more than {MAX_CHARS} times", time=False)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if abs(left) > 1 and (right > 64 or abs(left) ** abs(right) > _MAX_NUMBER):
                raise BudgetError("a power is above what numbers here may be", time=False)
        return super().call_binop(context, operator, left, right)


def render(template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
    """The text. Raises BudgetError beside what jinja and the template raise."""
    try:
        return _generated(template, variables, budget)
    except AttributeError as exc:  # some of jinja's filters ask nothing before they use a value
        raise jinja2.exceptions.TemplateRuntimeError(str(exc)) from exc


def _generated(template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
    parts, size = [], 0
    for part in template.generate({**variables, _ASK: budget}):
        parts.append(part)
        size += len(part)
        if size > MAX_CHARS:
            raise BudgetError(f"it writes more than {MAX_CHARS} characters", time=False)
        budget()
    return "".join(parts)


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}…{% endgeneration %}, which marks text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own convention)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_text"), [], [], body).set_lineno(line)

    def _as_text(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates: a constructor, not the class with all that hangs on it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """A namespace that keeps no underscore-prefixed attribute."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attrs = dict(*rest, **kwargs)
        for name in attrs:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} on a namespace")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


def to_json(  # templates pass these by position too, as transformers lets them
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON as transformers writes it in templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
