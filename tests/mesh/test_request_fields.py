"""What each field of a request does to the output, end to end, held against transformers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from pydantic import BaseModel

from services.router.openai import reply_models as replies
from tests.mesh.conftest import EOS, Served
from tests.support.asking import random_prompt
from tests.support.hf_reference import logits

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4
"""Between logarithms of probabilities in float32."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
MESSAGES = [{"role": "user", "content": "hello the user"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REPLIES: dict[str, type[BaseModel]] = {
    COMPLETIONS: replies.Completion,
    CHAT: replies.ChatCompletion,
    "/generate": replies.Generation,
    "/tokenize": replies.Tokens,
    "/detokenize": replies.Text,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(llama: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=llama.mesh.url, timeout=60.0, trust_env=False) as client:
        yield client


async def ask(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The reply, which must be what /openapi.json says of it."""
    response = await http.post(path, json={"model": "default", **body})
    assert response.status_code == 200, response.text
    REPLIES[path].model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    return found


async def events(http: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await http.post(path, json={"model": "default", **body, "stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.status_code == 200 and lines.pop() == "[DONE]", response.text
    return [json.loads(line) for line in lines]


def scores(llama: Served, tokens: Sequence[int]) -> torch.Tensor:
    """Row i: what transformers gives each token to follow tokens[: i + 1], as logarithms."""
    return torch.log_softmax(logits(llama.model, tokens), -1)


def near(told: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(told) == len(wanted) and all(abs(a - b) <= TOLERANCE for a, b in zip(told, wanted, strict=True))


# ---- log probabilities ------------------------------------------------------------------------------------


async def test_completion_log_probabilities_equal_transformers(llama: Served, http: httpx.AsyncClient) -> None:
    prompt = list(random_prompt(40, 101))
    body = {**GREEDY, "prompt": prompt, "max_tokens": 8, "logprobs": 5, "return_tokens_as_token_ids": True}
    choice = (await ask(http, COMPLETIONS, **body))["choices"][0]
    output, lists = choice["token_ids"], choice["logprobs"]
    rows = scores(llama, prompt + output)[len(prompt) - 1 : -1]
    assert lists["tokens"] == [f"token_id:{t}" for t in output]
    assert near(lists["token_logprobs"], [float(row[t]) for row, t in zip(rows, output, strict=True)])
    for row, top in zip(rows, lists["top_logprobs"], strict=True):
        best = row.topk(5)
        assert {int(t.removeprefix("token_id:")) for t in top} == set(best.indices.tolist())
        assert near(sorted(top.values(), reverse=True), best.values.tolist())
    parts = [e["choices"][0] for e in await events(http, COMPLETIONS, **body)]
    told = [p["logprobs"] for p in parts if p["logprobs"]]
    assert [t for p in told for t in p["tokens"]] == lists["tokens"]
    assert near([v for p in told for v in p["token_logprobs"]], lists["token_logprobs"])
    assert [o for p in told for o in p["text_offset"]] == lists["text_offset"]


async def test_chat_log_probabilities_equal_transformers(llama: Served, http: httpx.AsyncClient) -> None:
    body = {**GREEDY, "messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    data = await ask(http, CHAT, **body)
    prompt, output = data["prompt_token_ids"], data["choices"][0]["token_ids"]
    rows = scores(llama, prompt + output)[len(prompt) - 1 : -1]
    listed = data["choices"][0]["logprobs"]["content"]
    assert near([t["logprob"] for t in listed], [float(row[t]) for row, t in zip(rows, output, strict=True)])
    for row, entry in zip(rows, listed, strict=True):
        assert near([t["logprob"] for t in entry["top_logprobs"]], row.topk(3).values.tolist())
    spelled = b"".join(bytes(t["bytes"]) for t in listed).decode(errors="replace")
    assert spelled == (await ask(http, "/detokenize", tokens=output))["prompt"]
    parts = await events(http, CHAT, **body)
    streamed = [t for p in parts for t in (p["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [t["token"] for t in streamed] == [t["token"] for t in listed]
    assert near([t["logprob"] for t in streamed], [t["logprob"] for t in listed])


async def test_what_evaluation_tools_score(llama: Served, http: httpx.AsyncClient) -> None:
    """A batch of token ids with echo: each position has its own probability and the best one."""
    prompts = [list(random_prompt(n, n)) for n in (60, 17)]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choices = (await ask(http, COMPLETIONS, **body))["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        lists = choice["logprobs"]
        rows = scores(llama, prompt)[:-1]
        told, top = lists["token_logprobs"][1:-1], lists["top_logprobs"][1:-1]
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert near(told, [float(row[t]) for row, t in zip(rows, prompt[1:], strict=True)])
        for value, best, row, token in zip(told, top, rows, prompt[1:], strict=True):
            assert value in best.values() and abs(max(best.values()) - float(row.max())) <= TOLERANCE
            assert (value == max(best.values())) == (int(row.argmax()) == token)
        text = (await ask(http, "/detokenize", tokens=prompt))["prompt"]
        assert choice["text"].startswith(text) and len(lists["tokens"]) == len(prompt) + 1

    only = await ask(http, COMPLETIONS, **{**body, "max_tokens": 0})
    assert only["usage"]["completion_tokens"] == 0
    for with_token, without in zip(choices, only["choices"], strict=True):
        assert without["finish_reason"] == "length"
        assert near(without["logprobs"]["token_logprobs"][1:], with_token["logprobs"]["token_logprobs"][1:-1])
    part = (await events(http, COMPLETIONS, **{**body, "prompt": prompts[0], "max_tokens": 0}))[0]["choices"][0]
    assert part["text"] == only["choices"][0]["text"]
    assert near(part["logprobs"]["token_logprobs"][1:], only["choices"][0]["logprobs"]["token_logprobs"][1:])


async def test_prompt_log_probabilities_whatever_is_cached(llama: Served, http: httpx.AsyncClient) -> None:
    prompt = list(random_prompt(70, 103))
    await ask(http, COMPLETIONS, prompt=prompt, max_tokens=1)
    body = {**GREEDY, "prompt": prompt, "max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    data = await ask(http, COMPLETIONS, **body)
    first, second = (choice["prompt_logprobs"] for choice in data["choices"])
    assert first == second and first[0] is None and len(first) == len(prompt)
    for position, row, token in zip(first[1:], scores(llama, prompt), prompt[1:], strict=False):
        own = position[str(token)]
        assert abs(own["logprob"] - float(row[token])) <= TOLERANCE
        better = int((row > row[token] + TOLERANCE).sum())
        equal = int(((row - row[token]).abs() <= TOLERANCE).sum())
        assert better < own["rank"] <= better + equal
        assert set(position) <= {str(token), *map(str, row.topk(3).indices.tolist())}


# ---- what is drawn -----------------------------------------------------------------------------------------


def penalised(llama: Served, prompt: list[int], count: int, frequency: float, presence: float, repetition: float) -> list[int]:  # fmt: skip  # noqa: E501
    """Greedy tokens by the definition: CTRL's penalty over prompt and output, then OpenAI's over the output."""
    output: list[int] = []
    for _ in range(count):
        row = logits(llama.model, prompt + output)[-1].clone()
        seen = torch.tensor(sorted({*prompt, *output}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        for token, times in Counter(output).items():
            row[token] -= frequency * times + presence
        output.append(int(row.argmax()))
    return output


@pytest.mark.parametrize(
    ("frequency", "presence", "repetition"), [(-2.0, 0.0, 1.0), (1.5, 2.0, 1.0), (0.0, 0.0, 1.8), (2.0, -1.0, 0.6)]
)
async def test_penalties(
    llama: Served, http: httpx.AsyncClient, frequency: float, presence: float, repetition: float
) -> None:
    prompt = list(random_prompt(12, 104))
    data = await ask(
        http, COMPLETIONS, **GREEDY, prompt=prompt, max_tokens=12, frequency_penalty=frequency,
        presence_penalty=presence, repetition_penalty=repetition,
    )  # fmt: skip
    assert data["choices"][0]["token_ids"] == penalised(llama, prompt, 12, frequency, presence, repetition)


async def test_biases_force_and_ban_tokens(llama: Served, http: httpx.AsyncClient) -> None:
    prompt = list(random_prompt(20, 105))
    body = {**GREEDY, "prompt": prompt, "max_tokens": 6}
    for path in (COMPLETIONS, "/generate"):
        more = {"token_ids": prompt} if path == "/generate" else {"prompt": prompt}
        forced = await ask(http, path, **{**GREEDY, "max_tokens": 6, **more}, logit_bias={"70": 100})
        assert (forced.get("output_ids") or forced["choices"][0]["token_ids"]) == [70] * 6
    free = (await ask(http, COMPLETIONS, **body))["choices"][0]["token_ids"]
    banned = (await ask(http, COMPLETIONS, **body, logit_bias={str(free[0]): -100}))["choices"][0]["token_ids"]
    assert free[0] not in banned
    assert banned[0] == int(scores(llama, prompt)[-1].topk(2).indices[1])
    refused = await http.post(COMPLETIONS, json={"model": "default", **body, "logit_bias": {"325": 1}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"


async def test_the_best_of_some_samples(http: httpx.AsyncClient) -> None:
    prompt = list(random_prompt(30, 106))
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 1.3, "seed": 5, "ignore_eos": True}
    samples = (await ask(http, COMPLETIONS, **body, n=4, logprobs=0))["choices"]
    means = [math.fsum(c["logprobs"]["token_logprobs"]) / 6 for c in samples]
    order = sorted(range(4), key=lambda i: -means[i])
    data = await ask(http, COMPLETIONS, **body, n=2, best_of=4)
    assert [c["text"] for c in data["choices"]] == [samples[i]["text"] for i in order[:2]]
    assert [c["index"] for c in data["choices"]] == [0, 1] and data["choices"][0]["logprobs"] is None
    assert data["usage"]["completion_tokens"] == 24 and data["usage"]["prompt_tokens"] == 30


# ---- what is shown -----------------------------------------------------------------------------------------


async def test_stop_strings_and_tokens_may_stay_in_the_text(http: httpx.AsyncClient) -> None:
    prompt = list(random_prompt(25, 107))
    body = {**GREEDY, "prompt": prompt, "max_tokens": 12, "logit_bias": {str(i): -100 for i in range(130, 260)}}
    free = (await ask(http, COMPLETIONS, **body))["choices"][0]
    stop = free["text"][4:6]
    end = free["text"].index(stop)
    for streams in (False, True):
        for include in (False, True):
            asked = {**body, "stop": [stop, "\x00"], "include_stop_str_in_output": include}
            if streams:
                parts = [e["choices"][0] for e in await events(http, COMPLETIONS, **asked)]
            else:
                parts = [(await ask(http, COMPLETIONS, **asked))["choices"][0]]
            assert "".join(p["text"] for p in parts) == free["text"][: end + len(stop) * include]
            assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", stop)
    third = free["token_ids"][2]
    until = free["token_ids"].index(third) + 1
    for include in (False, True):
        asked = {**body, "stop_token_ids": [third], "include_stop_str_in_output": include}
        choice = (await ask(http, COMPLETIONS, **asked))["choices"][0]
        shown = free["token_ids"][: until - (not include)]
        assert choice["text"] == (await ask(http, "/detokenize", tokens=shown))["prompt"]
        assert choice["token_ids"] == free["token_ids"][:until]


async def test_special_tokens_are_text_only_when_asked_for(http: httpx.AsyncClient) -> None:
    body = {**GREEDY, "prompt": "hello", "max_tokens": 2, "logit_bias": {"1": 100}}
    for skip, text in ((True, ""), (False, "<|im_start|>" * 2), (None, "")):
        choice = (await ask(http, COMPLETIONS, **body, skip_special_tokens=skip))["choices"][0]
        assert (choice["text"], choice["token_ids"]) == (text, [1, 1])
        chat = await ask(http, CHAT, **{**body, "messages": MESSAGES}, skip_special_tokens=skip)
        assert chat["choices"][0]["message"]["content"] == text
    ended = {**body, "ignore_eos": False, "logit_bias": {str(EOS): 100}, "skip_special_tokens": False}
    for include, text in ((False, ""), (True, "<|im_end|>")):
        choice = (await ask(http, COMPLETIONS, **ended, include_stop_str_in_output=include))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


async def test_usage_is_exact_in_every_mode(llama: Served, http: httpx.AsyncClient) -> None:
    prompt, salt = list(random_prompt(50, 108)), llama.asker.salt()
    body = {**GREEDY, "prompt": prompt, "max_tokens": 5, "n": 2, "cache_salt": salt}
    usage = (await ask(http, COMPLETIONS, **body))["usage"]
    assert usage == {
        "prompt_tokens": 50,
        "completion_tokens": 10,
        "total_tokens": 60,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
        },
    }  # fmt: skip
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = await events(http, COMPLETIONS, **body, stream_options=options)
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["total_tokens"] == 60
    assert parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    counts = [p["usage"]["completion_tokens"] for p in parts[:-1]]
    assert counts == sorted(counts) and counts[-1] == 10
    assert all("usage" not in p for p in await events(http, COMPLETIONS, **body))


MODES: dict[str, dict[str, Any]] = {
    "several prompts and samples": {"prompt": [[5, 6, 7] * 9, [8] * 17], "n": 2, "temperature": 1.0, "seed": 4},
    "text": {"prompt": "hello the user"},
    "a stop string": {"stop": ["\ufffd", "e", "s"]},
    "a stop token": {"stop_token_ids": list(range(100, 325))},
    "the end": {"logit_bias": {"2": 100}, "ignore_eos": False},
    "the end, later": {"logit_bias": {"2": 100}, "ignore_eos": False, "min_tokens": 3},
    "no end": {"logit_bias": {"2": 100}},
    "echo": {"echo": True, "logprobs": 1},
    "scores alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "scores of the prompt": {"prompt_logprobs": 1},
    "the best": {"best_of": 3, "temperature": 1.0, "seed": 4},
}


@pytest.mark.parametrize("mode", MODES)
async def test_usage_counts_the_tokens_that_are_shown(llama: Served, http: httpx.AsyncClient, mode: str) -> None:
    """Whole and streamed; what every chunk says of it only grows, and the last one says all."""
    asked = {**GREEDY, "prompt": list(random_prompt(50, 110)), "max_tokens": 9, "cache_salt": llama.asker.salt()}
    asked |= MODES[mode]
    whole = await ask(http, COMPLETIONS, **asked)
    usage, shown = whole["usage"], sum(len(choice["token_ids"]) for choice in whole["choices"])
    prompts = {choice["index"] // asked.get("n", 1): choice["prompt_token_ids"] for choice in whole["choices"]}
    assert usage["prompt_tokens"] == sum(map(len, prompts.values()))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    if "best_of" in asked:
        assert (usage["completion_tokens"], shown) == (27, 9)
        return
    assert usage["completion_tokens"] == shown
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = await events(http, COMPLETIONS, **asked, stream_options=options)
    scored = "prompt_logprobs" in asked or "echo" in asked  # the prompt is computed anew
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]  # or it goes to the other prefill worker
    found = 0 if scored else sum((len(prompt) - 1) // 16 * 16 for prompt in prompts.values())
    assert cached % 16 == 0 and 0 <= cached <= found
    details = {**usage["prompt_tokens_details"], "cached_tokens": cached}
    assert last["usage"] == {**usage, "prompt_tokens_details": details} == parts[-1]["usage"]
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and {p["usage"]["prompt_tokens"] for p in parts} == {usage["prompt_tokens"]}


async def test_echo_spells_special_tokens_as_the_output_does(http: httpx.AsyncClient) -> None:
    prompt = [1, 70, 2, 71]
    for skip, shown in ((True, [70, 71]), (False, prompt)):
        text = (await ask(http, "/detokenize", tokens=shown))["prompt"]
        asked = {**GREEDY, "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0, "skip_special_tokens": skip}
        choice = (await ask(http, COMPLETIONS, **asked))["choices"][0]
        assert choice["text"] == text
        parts = [text] if skip else ["<|im_start|>", "<|im_end|>"]
        assert all(part in text for part in parts) and ("<|im_end|>" in text) == (not skip)
        assert choice["logprobs"]["text_offset"][-1] == len(text) - 1


# ---- the prompt and the deadline ------------------------------------------------------------------------------


async def test_an_answer_that_goes_on(http: httpx.AsyncClient) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "so the"}]
    data = await ask(http, CHAT, **GREEDY, messages=begun, max_tokens=3, continue_final_message=True)
    text = "<|im_start|>user\nhello the user<|im_end|>\n<|im_start|>assistant\nso the"
    wanted = (await ask(http, "/tokenize", prompt=text))["tokens"]
    assert data["prompt_token_ids"] == wanted
    assert (await ask(http, "/tokenize", messages=begun, continue_final_message=True))["tokens"] == wanted
    plain = await ask(http, COMPLETIONS, **GREEDY, prompt=wanted, max_tokens=3)
    assert plain["choices"][0]["text"] == data["choices"][0]["message"]["content"]


async def test_a_client_may_set_its_own_deadline(http: httpx.AsyncClient) -> None:
    long = {"model": "default", "prompt": "hello", "max_tokens": 4000, "ignore_eos": True}
    for body, headers in ((long | {"timeout": 0.001}, {}), (long | {"timeout": 50}, {"x-request-timeout": "0.001"})):
        response = await http.post(COMPLETIONS, json=body, headers=headers)
        assert response.status_code == 408, response.text
        assert response.json()["error"]["code"] == "request_timeout"
    for wrong in ("soon", "0", "-1", "nan", "1e9"):
        response = await http.post(COMPLETIONS, json=long, headers={"x-request-timeout": wrong})
        assert response.status_code == 400 and response.json()["error"]["param"] == "x-request-timeout"


async def test_generate_reports_log_probabilities(llama: Served, http: httpx.AsyncClient) -> None:
    prompt = list(random_prompt(20, 109))
    body = {"token_ids": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    data = await ask(http, "/generate", **body, prompt_logprobs=0)
    rows = scores(llama, prompt + data["output_ids"])[len(prompt) - 1 : -1]
    assert [t["token_id"] for t in data["logprobs"]] == data["output_ids"]
    assert near([t["logprob"] for t in data["logprobs"]], rows.max(-1).values.tolist())
    assert [(t["rank"], t["top"][0][0]) for t in data["logprobs"]] == [(1, i) for i in data["output_ids"]]
    assert [list(p) for p in data["prompt_logprobs"][1:]] == [[str(t)] for t in prompt[1:]]
    first, *_, last = await events(http, "/generate", **body)
    assert first["logprobs"][0]["token_id"] == data["output_ids"][0] and last["finish_reason"] == "length"
    only = await ask(http, "/generate", **{**body, "max_tokens": 0}, prompt_logprobs=0)
    assert (only["output_ids"], only["logprobs"], only["finish_reason"]) == ([], [], "length")


async def test_templates_of_clients_are_not_trusted(http: httpx.AsyncClient) -> None:
    body = {"model": "default", "messages": MESSAGES, "chat_template": "{{ messages[0].content }}"}
    for path in (CHAT, "/tokenize"):
        response = await http.post(path, json={"model": "default", **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in error["message"]
