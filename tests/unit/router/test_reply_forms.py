"""How replies look: log probabilities, echo, the best of several samples, reasoning and tool calls, usage."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from engine_core.types.errors import InternalError
from engine_core.types.sampling import TokenLogprobs
from services.router.journey import Delta, SampleResult
from services.router.openai.chat_reply import ChatReply
from services.router.openai.reply_models import ChatCompletion as ChatBody
from services.router.openai.reply_models import Completion as CompletionBody
from services.router.openai.stream import CompletionReply
from services.router.parsers.base import OutputParser
from services.router.parsers.choice import OutputFormat
from services.router.reply_spec import ReplySpec
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import tiny_model

EOS = 2

NOTHING_ELSE = {
    "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
}  # fmt: skip


@functools.cache
def tokenizer() -> RouterTokenizer:
    return RouterTokenizer.load(tiny_model())


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def result(ids: Sequence[int], reason: str = "stop", **more: Any) -> SampleResult:
    return SampleResult(1, 1, list(ids), reason, None, cached_tokens=2, timings={}, **more)


def position(token_id: int, logprob: float = -1.0, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, top)


def spec(prompts: Sequence[Sequence[int]] = ((5, 6),), **more: Any) -> ReplySpec:
    return ReplySpec("r", "m", prompts, tokenizer(), **more)


def deltas(text: str, *, logprobs: bool = False, per_delta: int = 1, reason: str = "stop") -> list[Delta]:
    """One delta per some tokens of a text, as a journey gives them."""
    ids = ids_of(text)
    state, out = tokenizer().detokenizer(), []
    for at in range(0, len(ids), per_delta):
        some = ids[at : at + per_delta]
        scores = [position(i, -0.5, (i, -0.5)) for i in some] if logprobs else []
        out.append(Delta(state.add(some), some, None, scores))
    scores = [position(i, -0.5, (i, -0.5)) for i in ids] if logprobs else []
    out[-1].result = result(ids, reason, logprobs=scores)
    return out


def run(reply: CompletionReply | ChatReply, outputs: Sequence[Sequence[Delta]]) -> dict[str, Any]:
    """The whole reply, through JSON."""
    results = []
    for i, output in enumerate(outputs):
        for delta in output:
            reply.collect(i, delta)
        results.append(output[-1].result)
    found: dict[str, Any] = json.loads(json.dumps(reply.complete(results)))  # type: ignore[arg-type]
    return described(ChatBody if isinstance(reply, ChatReply) else CompletionBody, found)


def described(kind: type[BaseModel], body: dict[str, Any]) -> dict[str, Any]:
    """The body, which must be what /openapi.json says of it."""
    kind.model_validate_json(json.dumps(body), strict=True)
    return body


def stream(reply: CompletionReply | ChatReply, outputs: Sequence[Sequence[Delta]]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    data = b"".join(reply.take(i, delta) for i, output in enumerate(outputs) for delta in output)
    data += reply.end([output[-1].result for output in outputs])  # type: ignore[misc]
    events = data.decode().split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


# ---- log probabilities --------------------------------------------------------------------------------------


def test_chat_log_probabilities_spell_parts_of_characters() -> None:
    parrot = ids_of("🦜")
    assert len(parrot) == 4  # a byte each
    scores = [position(i, -0.25, (i, -0.25), (EOS, -math.inf)) for i in parrot]
    output = [Delta("🦜", parrot, result(parrot, logprobs=scores), scores)]
    whole = run(ChatReply(spec(logprobs=2)), [output])
    listed = whole["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in listed] == ["\\xf0", "\\x9f", "\\xa6", "\\x9c"]
    assert bytes(b for t in listed for b in t["bytes"]).decode() == "🦜"
    assert listed[0]["top_logprobs"] == [
        {"token": "\\xf0", "logprob": -0.25, "bytes": [0xF0]},
        {"token": "<|im_end|>", "logprob": -9999.0, "bytes": list(b"<|im_end|>")},
    ]
    typed = ChatCompletion.model_validate(whole, strict=True)
    assert typed.choices[0].logprobs is not None and len(typed.choices[0].logprobs.content or []) == 4
    chunks = stream(ChatReply(spec(logprobs=2)), [output])
    assert [c["choices"][0]["logprobs"] for c in chunks] == [None, {"content": listed, "refusal": None}]
    few = run(ChatReply(spec(logprobs=0)), [output])
    assert [t["top_logprobs"] for t in few["choices"][0]["logprobs"]["content"]] == [[]] * 4


def test_completion_log_probabilities() -> None:
    the, parrot = ids_of("the"), ids_of("é")
    ids = [*the, *parrot, EOS]
    scores = [position(i, -0.5, (the[0], -0.125)) for i in ids]
    output = [Delta("theé", ids, result(ids, logprobs=scores), scores)]
    lists = run(CompletionReply(spec(logprobs=1)), [output])["choices"][0]["logprobs"]
    assert lists["tokens"] == ["the", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert lists["token_logprobs"] == [-0.5] * 4
    assert lists["text_offset"] == [0, 3, 3, 4]
    assert lists["top_logprobs"] == [
        {"the": -0.125},  # of two that are spelled alike the likelier
        {"the": -0.125, "bytes:\\xc3": -0.5},
        {"the": -0.125, "bytes:\\xa9": -0.5},
        {"the": -0.125, "<|im_end|>": -0.5},
    ]
    named = run(CompletionReply(spec(logprobs=0, tokens_as_ids=True)), [output])["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{i}" for i in ids]
    assert named["top_logprobs"][0] == {f"token_id:{the[0]}": -0.5}


def test_streamed_log_probabilities_join_to_the_whole() -> None:
    text = "the user asks: naïve 🦜, and so"
    whole = run(CompletionReply(spec(logprobs=1)), [deltas(text, logprobs=True)])["choices"][0]
    chunks = stream(CompletionReply(spec(logprobs=1)), [deltas(text, logprobs=True, per_delta=3)])
    parts = [c["choices"][0] for c in chunks]
    assert "".join(p["text"] for p in parts) == whole["text"] == text
    for name, values in whole["logprobs"].items():
        assert [v for p in parts for v in p["logprobs"][name]] == values, name
    assert len(whole["logprobs"]["tokens"]) == len(ids_of(text))
    Completion.model_validate(chunks[-1])


def test_log_probabilities_that_do_not_fit_their_tokens_are_an_error() -> None:
    wrong = [Delta("the", ids_of("the"), result(ids_of("the"), logprobs=[]), [])]
    for reply in (CompletionReply(spec(logprobs=0)), ChatReply(spec(logprobs=0))):
        with pytest.raises(InternalError, match="0 log probabilities of 1 tokens"):
            run(reply, [wrong])
        with pytest.raises(InternalError):
            stream(reply, [wrong])


# ---- the prompt ----------------------------------------------------------------------------------------------


def echoing(prompt: str, **more: Any) -> tuple[CompletionReply, list[Delta]]:
    ids = ids_of(prompt)
    scores = [position(i, -0.75, (3, -0.25)) for i in ids[1:]]
    output = deltas(" so", logprobs=True)
    output.insert(0, Delta("", [], prompt_logprobs=scores))
    return CompletionReply(spec((ids,), **more), [prompt]), output


def test_echo_with_log_probabilities() -> None:
    prompt = "hello<|im_end|> é the"
    reply, output = echoing(prompt, logprobs=1)
    choice = run(reply, [output])["choices"][0]
    assert choice["text"] == prompt + " so"
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    tokens, offsets = lists["tokens"], lists["text_offset"]
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset), (token, offset)
    at = tokens.index("bytes:\\xc3")
    assert tokens[at + 1] == "bytes:\\xa9" and offsets[at] == offsets[at + 1] == choice["text"].index("é")
    third = ids_of(prompt)[1]
    assert lists["top_logprobs"][1] == {tokens[1]: -0.75, tokenizer().bytes.of(3).decode(): -0.25}, third
    reply, output = echoing(prompt, logprobs=1)
    parts = [c["choices"][0] for c in stream(reply, [output])]
    assert parts[0]["text"] == prompt and "".join(p["text"] for p in parts) == choice["text"]
    for name, values in lists.items():
        assert [v for p in parts for v in p["logprobs"][name]] == values


def test_scoring_alone_has_the_prompt_and_no_token() -> None:
    reply, output = echoing("hello the", logprobs=1)
    body = run(reply, [[output[0], Delta("", [], result([], "length"))]])
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello the", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids_of("hello the"))
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_log_probabilities_in_vllms_form() -> None:
    ids = ids_of("the user")
    scores = [TokenLogprobs(i, -2.0, 7, ((3, -0.5), (4, -0.625))) for i in ids[1:]]
    first = Delta("", [], prompt_logprobs=scores)
    output = [first, *deltas("so")]
    wanted = [
        None,
        *(
            {
                str(i): {"logprob": -2.0, "rank": 7, "decoded_token": tokenizer().decode([i])},
                "3": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer().decode([3])},
            }
            for i in ids[1:]
        ),
    ]
    asked = spec((ids,), prompt_logprobs=1)
    assert run(CompletionReply(asked), [output])["choices"][0]["prompt_logprobs"] == wanted
    assert run(ChatReply(asked), [output])["prompt_logprobs"] == wanted
    assert stream(CompletionReply(asked), [output])[0]["choices"][0]["prompt_logprobs"] == wanted
    assert stream(ChatReply(asked), [output])[0]["prompt_logprobs"] == wanted


# ---- several samples -----------------------------------------------------------------------------------------


def test_the_best_samples_by_their_mean_log_probability() -> None:
    def sample(text: str, logprob: float) -> list[Delta]:
        ids = ids_of(text)
        return [Delta(text, ids, result(ids, logprobs=[position(i, logprob) for i in ids]))]

    outputs = [
        sample("the user", -0.5), sample("so", -0.25), sample("a", -0.75),
        sample("x", -3.0), sample("y", -2.0), sample("z", -1.0),
    ]  # fmt: skip
    body = run(CompletionReply(spec(((5,), (6, 7)), samples=3, keep=2)), outputs)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "so"), (1, "the user"), (2, "z"), (3, "y")]
    assert body["choices"][0]["logprobs"] is None
    spent = sum(len(o[-1].token_ids) for o in outputs)
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == spent
    assert body["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 4,
        "audio_tokens": 0,
    }  # of each prompt's first sample


# ---- reasoning and tool calls -----------------------------------------------------------------------------------


def parser() -> OutputParser:
    """Of models that think in <think> and call in hermes' form."""
    found = OutputFormat(tools="hermes", reasoning="deepseek_r1").parser(["weather", "time"])
    assert found is not None
    return found


THOUGHT = "<think>the user is in </b> there</think>so: "
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("per_delta", [1, 2, 7, 1000])
def test_reasoning_content_and_calls(per_delta: int) -> None:
    output = deltas(THOUGHT + CALLS, per_delta=per_delta)
    whole = run(ChatReply(spec(), parser), [output])
    typed = ChatCompletion.model_validate(whole)
    choice = typed.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so: ")
    assert whole["choices"][0]["message"]["reasoning_content"] == "the user is in </b> there"
    assert whole["choices"][0]["message"]["reasoning"] == "the user is in </b> there"
    called = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or [] if c.type == "function"]
    assert called == [("weather", '{"city": "Köln"}'), ("time", "{}")]
    known = {c.id for c in choice.message.tool_calls or []}
    assert len(known) == 2 and all(i.startswith("call_") and len(i) == 29 for i in known)

    chunks = stream(ChatReply(spec(include_usage=True), parser), [output])
    last = [ChatCompletionChunk.model_validate(c) for c in chunks]
    assert last[-1].usage is not None and last[-2].choices[0].finish_reason == "tool_calls"
    parts = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert parts[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(p.get("reasoning_content", "") for p in parts) == "the user is in </b> there"
    assert "".join(p.get("content", "") for p in parts) == "so: "
    entries = [e for p in parts for e in p.get("tool_calls", [])]
    for index, (name, arguments) in enumerate(called):
        mine = [e for e in entries if e["index"] == index]
        assert mine[0]["type"] == "function" and mine[0]["function"]["name"] == name
        assert all("id" not in e and "name" not in e["function"] for e in mine[1:])
        assert "".join(e["function"]["arguments"] for e in mine) == arguments
    # Marks, and what stands behind them, are no reasoning.
    inner = ids_of(THOUGHT + CALLS)
    told = chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert told == whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    shadow = tokenizer().detokenizer()
    text, counted = "", 0
    for token in inner:
        before = len(text)
        text += shadow.add([token])
        counted += before < len("<think>the user is in </b> there") and len(text) > len("<think>")
    assert told == counted > 5


def test_calls_alone_have_no_content_and_a_cut_one_is_no_call_that_ended() -> None:
    output = deltas("<think>a</think>" + CALLS)
    message = run(ChatReply(spec(), parser), [output])["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2
    output = deltas("<think>a</think>" + CALLS, reason="length")
    assert run(ChatReply(spec(), parser), [output])["choices"][0]["finish_reason"] == "length"
    chunks = stream(ChatReply(spec(), parser), [output])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_thought_that_is_cut_is_all_there_is() -> None:
    output = deltas("<think>the user", reason="length")
    body = run(ChatReply(spec(), parser), [output])
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "the user")
    assert "tool_calls" not in message
    spent = body["usage"]["completion_tokens"]
    assert 0 < body["usage"]["completion_tokens_details"]["reasoning_tokens"] < spent


# ---- usage -------------------------------------------------------------------------------------------------------


def test_usage_of_a_stream_comes_only_when_asked_for() -> None:
    output = deltas("the user asks")
    assert all("usage" not in c for c in stream(ChatReply(spec()), [output]))
    chunks = stream(ChatReply(spec(include_usage=True)), [output])
    assert [c["usage"] is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    count = len(ids_of("the user asks"))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": count,
        "total_tokens": 2 + count,
        "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0},
        "completion_tokens_details": NOTHING_ELSE,
    }
    running = stream(ChatReply(spec(continuous_usage=True)), [output])
    assert [c["usage"]["completion_tokens"] for c in running] == [0, *range(1, count + 1)]
    *before, last = running
    assert {json.dumps(c["usage"]["prompt_tokens_details"]) for c in before} == {"null"}
    assert last["usage"] == chunks[-1]["usage"]


def test_two_prompts_with_two_samples_count_each_prompt_once() -> None:
    outputs = [deltas("the"), deltas("user"), deltas("so"), deltas("a")]
    body = run(CompletionReply(spec(((5, 6, 7), (8,)), samples=2, keep=2)), outputs)
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == sum(len(o[-1].result.token_ids) for o in outputs if o[-1].result)
    assert [c["text"] for c in body["choices"]] == ["the", "user", "so", "a"]
