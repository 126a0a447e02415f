"""guidellm and `evalscope perf`: every request of theirs succeeds, with exactly the tokens that were asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import Clients
from tests.support.clients import environment

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

REQUESTS, OUTPUT = 4, 12


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_guidellm(clients: Clients, path: str) -> None:
    report = clients.folder / f"guidellm{path.replace('/', '-')}.json"
    command = [
        environment("evaluation", "guidellm"), "run",
        "--backend", f"kind=openai_http,target={clients.mesh.url},model=default,request_format={path}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT}",
        "--tokenizer", f"kind=huggingface_auto,model={clients.model}",
        "--output", f"kind=json,path={report}", "--disable-console",
    ]  # fmt: skip
    ended = await clients.run(command, 400.0)
    assert ended.code == 0, str(ended)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}, str(ended)
    for one in benchmark["requests"]["successful"]:
        assert one["output_tokens"] == OUTPUT and one["prompt_tokens"] >= 32
        assert one["time_to_first_token_ms"] > 0


PERF: dict[str, tuple[str, ...]] = {
    "chat": ("--stream", "--top-k", "5", "--repetition-penalty", "1.1", "--frequency-penalty", "0.1"),
    "whole": ("--no-stream", "--n-choices", "2", "--temperature", "0.7", "--stop", "@@@@"),
    "ids": ("--stream", "--tokenize-prompt", "--logprobs", "--stop-token-ids", "0"),
}


@pytest.mark.parametrize("kind", list(PERF))
async def test_evalscope_perf(clients: Clients, kind: str) -> None:
    path = "/completions" if kind == "ids" else "/chat/completions"
    out = clients.folder / f"perf-{kind}"
    command = [
        environment("evalscope", "evalscope"), "perf", "--model", "default", "--api", "openai",
        "--url", f"{clients.url}{path}", "--dataset", "random", "--tokenizer-path", str(clients.model),
        "--min-prompt-length", "16", "--max-prompt-length", "32", "--seed", "7",
        "--max-tokens", str(OUTPUT), "--min-tokens", str(OUTPUT), "-n", str(REQUESTS), "--parallel", "2",
        "--extra-args", '{"ignore_eos":true}', "--outputs-dir", str(out), "--no-timestamp", *PERF[kind],
    ]  # fmt: skip
    ended = await clients.run(command, 400.0)
    assert ended.code == 0, str(ended)
    (summary,) = out.rglob("benchmark_summary.json")
    told: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    assert (told["Success Requests"], told["Failed Requests"]) == (REQUESTS, 0), str(ended)
    assert told["Avg Output Tokens"] == OUTPUT * (2 if kind == "whole" else 1), "by the usage that replies tell"
