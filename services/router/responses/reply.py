"""How responses look, whole and as events.

response.created, response.in_progress
per item    output_item.added
              text       content_part.added, output_text.delta…, output_text.done, content_part.done
              thoughts   the same, with reasoning_text.delta… and reasoning_text.done
              a call     function_call_arguments.delta…, function_call_arguments.done
            output_item.done
response.completed, or response.incomplete when the limit of tokens ended it
a failure   error, response.failed
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from engine_core.types.errors import PdmeshError
from services.router.chat.items import Closed, Grew, Item, ItemKind, Opened, Step
from services.router.edge.http import error_body, error_status
from services.router.item_reply import ItemReply, event
from services.router.journey import SampleResult
from services.router.prepare import PreparedChat
from services.router.responses.schema import FunctionTool, ResponsesRequest, TextConfig, TextFormat

_PREFIXES = {ItemKind.TEXT: "msg", ItemKind.THOUGHT: "rs", ItemKind.CALL: "fc"}
_TEXT_EVENTS = {ItemKind.TEXT: "response.output_text", ItemKind.THOUGHT: "response.reasoning_text"}


class ResponseReply(ItemReply):
    """Writes the replies of one request to /v1/responses."""

    def __init__(self, prepared: PreparedChat, asked: ResponsesRequest) -> None:
        super().__init__(prepared)
        self._prompt_tokens = len(self.spec.prompts[0])
        self._sequence = 0
        self._ids: list[str] = []
        options = prepared.submission.options
        self._head = {
            "id": f"resp_{self.spec.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.spec.model,
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": _reasoning(asked),
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": options.temperature,
            "text": _text(asked.text or TextConfig()),
            "tool_choice": asked.tool_choice or "auto",
            "tools": [_tool(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": options.top_p if asked.top_p is None else asked.top_p,
            "frequency_penalty": options.frequency_penalty,
            "presence_penalty": options.presence_penalty,
            "truncation": "disabled",
            "user": asked.user,
        }

    # ---- whole ------------------------------------------------------------------------------------

    def complete(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """See ItemReply."""
        return self._ended(results[0])

    # ---- in events --------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        response = {"response": self._response("in_progress")}
        return self._write("response.created", response) + self._write("response.in_progress", response)

    def _event(self, step: Step) -> bytes:
        item = step.item
        match step:
            case Opened():
                self._name(item)
                added = {"output_index": item.index, "item": self._item(item, empty=True)}
                return self._write("response.output_item.added", added) + self._part("added", item)
            case Grew(piece=piece):
                return self._delta(item, piece)
            case Closed():
                done = {"output_index": item.index, "item": self._item(item)}
                return self._text_done(item) + self._write("response.output_item.done", done)

    def _finish(self, result: SampleResult) -> bytes:
        response = self._ended(result)
        return self._write(f"response.{response['status']}", {"response": response})

    def _failed(self, exc: PdmeshError) -> bytes:
        error = error_body(exc)["error"]
        # Beside OpenAI's flat fields stands the object of the Open Responses specification; OpenAI's own clients
        # raise for it.
        flat = {"code": error["code"], "message": error["message"], "param": error["param"], "error": error}
        status = error_status(exc)
        code = "rate_limit_exceeded" if status == 429 else "server_error" if status >= 500 else "invalid_prompt"
        failed = {**self._response("failed"), "error": {"code": code, "message": error["message"]}}
        return self._write("error", flat) + self._write("response.failed", {"response": failed})

    def _delta(self, item: Item, piece: str) -> bytes:
        if item.kind is ItemKind.CALL:
            return self._write("response.function_call_arguments.delta", {**self._place(item), "delta": piece})
        data = {**self._place(item), "content_index": 0, "delta": piece}
        if item.kind is ItemKind.TEXT:
            data["logprobs"] = self._scores(item)
        return self._write(f"{_TEXT_EVENTS[item.kind]}.delta", data)

    def _text_done(self, item: Item) -> bytes:
        if item.kind is ItemKind.CALL:
            done = {**self._place(item), "name": item.name, "arguments": item.text}
            return self._write("response.function_call_arguments.done", done)
        late = b""
        data = {**self._place(item), "content_index": 0, "text": item.text}
        if item.kind is ItemKind.TEXT:
            scores = self._scores(item)  # of tokens that show nothing, such as the one that ends the output
            if scores:
                delta = {**self._place(item), "content_index": 0, "delta": "", "logprobs": scores}
                late = self._write("response.output_text.delta", delta)
            data["logprobs"] = self._listed[item.index]
        return late + self._write(f"{_TEXT_EVENTS[item.kind]}.done", data) + self._part("done", item)

    def _part(self, what: str, item: Item) -> bytes:
        if item.kind is ItemKind.CALL:
            return b""
        part = self._content(item, empty=what == "added")
        return self._write(f"response.content_part.{what}", {**self._place(item), "content_index": 0, "part": part})

    def _place(self, item: Item) -> dict[str, Any]:
        return {"item_id": self._ids[item.index], "output_index": item.index}

    def _write(self, kind: str, data: dict[str, Any]) -> bytes:
        self._sequence += 1
        return event(kind, {"sequence_number": self._sequence - 1, **data})

    # ---- objects ----------------------------------------------------------------------------------

    def _name(self, item: Item) -> None:
        self._ids.append(f"{_PREFIXES[item.kind]}_{secrets.token_hex(12)}")

    def _ended(self, result: SampleResult) -> dict[str, Any]:
        cut = result.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        count = len(result.token_ids)
        response["usage"] = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": self._output.reasoning_tokens},
            "total_tokens": self._prompt_tokens + count,
        }
        return {**response, **self._timings(result)}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [self._item(item) for item in self._items.all],
            "usage": None,
        }

    def _item(self, item: Item, *, empty: bool = False) -> dict[str, Any]:
        status = "in_progress" if empty else "completed" if item.closed and not item.cut else "incomplete"
        name = self._ids[item.index]
        if item.kind is ItemKind.CALL:
            arguments = "" if empty else item.text
            call = {"call_id": item.call_id, "name": item.name, "arguments": arguments}
            return {"type": "function_call", "id": name, **call, "status": status}
        content = [] if empty else [self._content(item)]
        if item.kind is ItemKind.THOUGHT:
            return {"type": "reasoning", "id": name, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}

    def _content(self, item: Item, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else item.text
        if item.kind is ItemKind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if empty else self._listed[item.index]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = asked.reasoning
    return {"effort": wanted and wanted.effort, "summary": wanted and wanted.summary}


def _text(wanted: TextConfig) -> dict[str, Any]:
    form = wanted.format or TextFormat()
    found: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        found |= {"name": form.name or "output", "description": form.description}
        found |= {"schema": form.schema_, "strict": form.strict is True}
    return {"format": found, **({} if wanted.verbosity is None else {"verbosity": wanted.verbosity})}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict is True,
    }
