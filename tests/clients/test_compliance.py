"""What llm-comply, which knows the specifications, finds in chat completions, responses and Anthropic's messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import environment, greedy_model, run
from tests.support.mesh import Mesh
from tests.support.models import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LINE_BREAK = 198
"""The small model, when it must call and may call again, does so for ever: here an output is one line."""
UNLIKE: dict[str, dict[str, str]] = {
    "openai-chat": {"chat-image-input": "HTTP 400 (expected [200])"},
    "open-responses": {"image-input": "HTTP 400 (expected [200])"},
    "anthropic": {"anth-image-input": "HTTP 400 (expected [200])"},
}
"""The model sees no pictures: the error says so."""
PASSED = {
    "openai-chat": {
        "chat-basic-response", "chat-system-prompt", "chat-multi-turn", "chat-tool-calling",
        "chat-streaming-response", "chat-streaming-usage", "chat-error-handling",
    },
    "open-responses": {
        "basic-response", "system-prompt", "multi-turn", "tool-calling", "streaming-response", "streaming-usage",
        "assistant-phase", "response-output-phase-schema", "error-handling",
    },
    "anthropic": {
        "anth-basic-response", "anth-system-prompt", "anth-multi-turn", "anth-tool-calling",
        "anth-streaming-response", "anth-streaming-usage", "anth-error-handling",
    },
}  # fmt: skip


async def test_llm_comply(tmp_path: Path) -> None:
    model = greedy_model(demo_model(), tmp_path / "SmolLM2-135M-Instruct", eos_token_id=[2, LINE_BREAK])
    folder = tmp_path / "client"
    folder.mkdir()
    async with Mesh(model, options={"kv_tokens": 2048, "threads": 2}) as mesh:
        for form in UNLIKE:
            command = [environment("sdks", "llm-comply"), "--format", form, "--base-url", mesh.base_url]
            ended = await run([*command, "--api-key", "none", "--model", "default", "--json"], folder, 400.0)
            assert ended.code in (0, 1), str(ended)
            results: dict[str, dict[str, Any]] = {one["id"]: one for one in json.loads(ended.output)["results"]}
            failed = {name: one["errors"][0] for name, one in results.items() if one["status"] == "failed"}
            assert failed == UNLIKE[form], str(ended)
            assert {name for name, one in results.items() if one["status"] == "passed"} >= PASSED[form], str(ended)
