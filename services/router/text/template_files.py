"""Where a model's chat templates come from.

    chat_template.jinja, else chat_template in tokenizer_config.json    the default
    additional_chat_templates/NAME.jinja, lists in the latter           by name; tool_use is taken where there are tools
    services/router/text/templates/NAME.jinja                                pdmesh's own, for models without any

`--chat-template` names one of these, or a file, and then it is the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_core.types.errors import ConfigError
from services.router.text.chat_template import ChatTemplate

DEFAULT, TOOL_USE = "default", "tool_use"
_OWN = Path(__file__).parent / "templates"
_MAX_BYTES = 1 << 20


def own_names() -> list[str]:
    """Names of pdmesh's own templates."""
    return sorted(path.stem for path in _OWN.glob("*.jinja"))


def templates_of(
    root: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], chosen: str = ""
) -> dict[str, ChatTemplate]:
    """The templates of a model's directory by name, or the chosen one as the default; empty for base models.

    `config` is its tokenizer_config.json. Raises ConfigError for what is not there or can't be compiled.
    """
    found = _sources(root, config)
    if chosen:
        found = {DEFAULT: _chosen(chosen, found)}
    return {name: _compiled(name, text, where, special_tokens) for name, (text, where) in found.items()}


def _sources(root: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name → text and where it is from."""
    found: dict[str, tuple[str, str]] = {}
    given = config.get("chat_template")
    where = str(root / "tokenizer_config.json")
    if isinstance(given, str):
        found[DEFAULT] = (given, where)
    elif isinstance(given, list):
        for entry in given:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[str(entry.get("name"))] = (entry["template"], where)
    for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = (_read(path), str(path))
    file = root / "chat_template.jinja"
    if file.is_file():
        found[DEFAULT] = (_read(file), str(file))
    return found


def _chosen(chosen: str, found: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    if chosen in found:
        return found[chosen]
    if chosen in own_names():
        path = _OWN / f"{chosen}.jinja"
        return _read(path), str(path)
    path = Path(chosen)
    if path.is_file():
        return _read(path), str(path)
    there = ", ".join(sorted({*found, *own_names()}))
    raise ConfigError(
        f"--chat-template {chosen} is neither a file nor a template's name; there are {there}", field="chat_template"
    )


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes: it is no chat template")
        return data.decode()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc


def _compiled(name: str, text: str, where: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(text, special_tokens)
    except Exception as exc:  # jinja raises many kinds
        raise ConfigError(f"the chat template {name} of {where} cannot be compiled: {exc}") from exc
