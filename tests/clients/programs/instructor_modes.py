"""instructor, by tools and by JSON schema, on the version of openai's SDK that it takes. Argument: the router's URL."""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
import openai
from cases import run
from pydantic import BaseModel, Field

URL = sys.argv[1]


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


class Cities(BaseModel):
    cities: list[City] = Field(min_length=2, max_length=3)


def ask(mode: Any, kind: Any, **more: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none", timeout=90, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"model": "default", "max_tokens": 120, "temperature": 0, "max_retries": 0, **more}
    return client.chat.completions.create(response_model=kind, messages=messages, **options)


def partial() -> Any:
    """A stream of objects that grow."""
    seen = [part.model_dump() for part in ask(instructor.Mode.JSON_SCHEMA, instructor.Partial[City], stream=True)]
    return [len(seen) > 1, seen[-1]]


if __name__ == "__main__":
    run({
        "version": lambda: openai.__version__.split(".")[0],
        "tools": lambda: ask(instructor.Mode.TOOLS, City).model_dump(),
        "tools_nested": lambda: ask(instructor.Mode.TOOLS, Cities).model_dump(),
        "schema": lambda: ask(instructor.Mode.JSON_SCHEMA, City).model_dump(),
        "schema_nested": lambda: ask(instructor.Mode.JSON_SCHEMA, Cities).model_dump(),
        "partial": partial,
    })  # fmt: skip
