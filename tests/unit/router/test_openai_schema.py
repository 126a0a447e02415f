"""What requests are read as, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.errors import InvalidRequestError
from services.router.chat.schema import ChatRequest
from services.router.edge.request_body import parse_request
from services.router.messages.schema import CountTokensRequest, MessagesRequest
from services.router.native.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest
from services.router.openai.schema import CompletionRequest
from services.router.options import SamplingDefaults, options_of
from services.router.responses.schema import ResponsesRequest
from services.router.sampling_schema import ELSEWHERE, UNSUPPORTED, SamplingRequest

USER = [{"role": "user", "content": "hi"}]
SILENT = {"role": "assistant", "content": " \n"}
CALLED = [{"role": "assistant", "content": "Let me see.", "tool_calls": [{"function": {"name": "f"}}]}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, orjson.dumps({"model": "default", "prompt": "a", **fields}))


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, orjson.dumps({"model": "default", "messages": USER, **fields}))


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompt_shapes(prompt: Any, read: Any) -> None:
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], None, 5, {"a": 1}, [1, -1], [1, 2.5], [True], [1, "a"], [2**31], [[1], [None]]]
)
def test_wrong_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e30),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 10**15),
        ("max_tokens", "16"),
        ("max_tokens", 16.0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 1000),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", 5),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["07"]),
        ("stop_token_ids", ["²"]),
        ("stop_token_ids", ["9999999999"]),
        ("stop_token_ids", "a"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("model", 5),
        ("user", []),
    ],
)
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{field: value})
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "neutral", "other", "reason"),
    [
        ("suffix", "", "x", "filling in the middle"),
        ("use_beam_search", False, True, "beam search"),
        ("length_penalty", 1.0, 0.5, "beam search"),
        ("functions", [], [{"name": "f"}], "use tools"),
        ("function_call", "auto", {"name": "f"}, "use tool_choice"),
        ("bad_words", [], ["x"], "logit_bias"),
        ("allowed_token_ids", None, [5], "logit_bias"),
        ("truncate_prompt_tokens", None, 5, "not cut"),
        ("modalities", ["text"], ["audio"], "text only"),
    ],
)
@pytest.mark.parametrize("ask", [completion, chat], ids=["completions", "chat"])
def test_fields_that_we_lack_are_taken_only_when_they_change_nothing(
    ask: Any, field: str, neutral: Any, other: Any, reason: str
) -> None:
    ask(**{field: neutral})
    ask(**{field: None})
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        ask(**{field: other})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("ask", "field", "value"),
    [
        (completion, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (completion, "top_logprobs", 3),
        (completion, "tool_choice", "required"),
        (completion, "continue_final_message", True),
        (chat, "echo", True),
        (chat, "best_of", 2),
    ],
)
def test_fields_of_the_other_api_are_refused(ask: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="only /v1/") as caught:
        ask(**{field: value})
    assert caught.value.field == field


def test_unknown_fields_are_ignored() -> None:
    assert completion(store=True, metadata={"a": "b"}, wonder=[1]).prompt == ("a",)


@pytest.mark.parametrize(
    ("body", "field", "told"),
    [
        (b'{"model": "default", "prompt": "a\xff"}', "prompt", "UTF-8"),
        (b'{"model": "default", "prompt": "\\ud800"}', "prompt", "surrogate"),
        (b'{"model": "default", "prompt": "a", "temperature": NaN}', "temperature", "NaN"),
        (b'{"model": "default", "prompt": "a", "top_p": -Infinity}', "top_p", "-Infinity"),
        (b'{"model": "default", "prompt": "a", "max_tokens": 1e999}', "max_tokens", "beyond"),
        (b'{"model": "default", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens", "beyond"),
        (b'{"model": "default", "prompt": ["a", "\\udc00"]}', "prompt[1]", "surrogate"),
        (b'{"model": "default", "prompt": \xff', "", "UTF-8"),
        (b"{", "", "not JSON"),
        (b"", "", "not JSON"),
        (b"[]", "", "object"),
        (b'"a"', "", "object"),
        (b"[" * 3000, "", "not JSON"),
    ],
)
def test_bodies_that_are_not_json(body: bytes, field: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        parse_request(CompletionRequest, body)
    assert caught.value.field == field


def test_message_contents() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "t", "tool_call_id": "1", "extra": 5},
    ]
    read = [m.for_template() for m in chat(messages=messages).messages]
    assert [m["content"] for m in read] == ["x", "a\nb", "", "t"]
    assert read[3]["extra"] == 5


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
    ],
)
def test_wrong_messages(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=messages)
    assert caught.value.field == field


def test_stop_tokens_may_be_written_in_digits() -> None:
    assert completion(prompt="x", stop_token_ids=[7, "7", "0", 3]).stop_token_ids == (7, 0, 3)


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(CompletionRequest, b'{"model": "default"}')
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "kind", [CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountTokensRequest]
)
@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": ""}])
def test_the_model_must_be_named_and_the_error_says_what_there_is(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(kind, orjson.dumps(body), ("demo", "tuned"))
    assert caught.value.field == "model"
    assert caught.value.message == "model: required; this server has 'demo', 'tuned' ('default' works for any)"


def test_generate_reads_sampling_params() -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 5, "temperature": 0}, "temperature": 0.5}
    asked = parse_request(GenerateRequest, orjson.dumps(body))
    assert (asked.prompt(), asked.token_limit(), asked.temperature) == ("a", 5, 0.5)
    for wrong in ({}, {"text": "a", "input_ids": [1]}):
        with pytest.raises(InvalidRequestError, match="exactly one"):
            parse_request(GenerateRequest, orjson.dumps(wrong)).prompt()


def options(asked: SamplingRequest, defaults: SamplingDefaults = SamplingDefaults()) -> Any:  # noqa: B008
    return options_of(asked, defaults, 16)


def test_options_fill_in_defaults() -> None:
    plain = options(completion())
    assert (plain.temperature, plain.top_p, plain.top_k, plain.n, plain.max_tokens) == (1.0, 1.0, 0, 1, 16)
    model = SamplingDefaults.read({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": "x"})
    filled = options(completion(), model)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0.6, 0.95, 20, 0.0)
    asked = options(completion(temperature=0, top_k=-1, top_p=0, seed=-1, stop="x"), model)
    assert (asked.temperature, asked.top_k, asked.seed, asked.stop) == (0.0, 0, 2**64 - 1, ("x",))
    assert 0 < asked.top_p < 1e-3
    assert options(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        options(completion(min_tokens=6, max_tokens=5))


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, GenerateRequest, TokenizeRequest])
def test_null_is_as_absent_and_the_description_says_so(kind: Any) -> None:
    needed: dict[str, Any] = {
        CompletionRequest: {"model": "default", "prompt": "a"},
        ChatRequest: {"model": "default", "messages": USER},
        GenerateRequest: {"text": "a"},
        TokenizeRequest: {"prompt": "a"},
    }[kind]
    properties = kind.model_json_schema()["properties"]
    optional = [name for name in properties if name not in needed]
    assert len(optional) > 8
    plain = parse_request(kind, orjson.dumps(needed))
    assert parse_request(kind, orjson.dumps({**needed, **dict.fromkeys(optional)})) == plain
    for name in optional:
        variants = properties[name].get("anyOf", [properties[name]])
        assert {"type": "null"} in variants, name


def test_penalties_biases_and_reports_reach_the_options() -> None:
    asked = options(
        completion(
            frequency_penalty=-2, presence_penalty=1.5, repetition_penalty=1.25, logit_bias={"7": -100, "0": 3.5},
            logprobs=4, prompt_logprobs=2, include_stop_str_in_output=True, skip_special_tokens=False, max_tokens=65535,
        )
    )  # fmt: skip
    assert (asked.frequency_penalty, asked.presence_penalty, asked.repetition_penalty) == (-2.0, 1.5, 1.25)
    assert asked.logit_bias == ((7, -100.0), (0, 3.5))
    assert (asked.logprobs, asked.prompt_logprobs, asked.max_tokens) == (4, 2, 65535)
    assert (asked.include_stop, asked.skip_special_tokens, asked.scores_only) == (True, False, False)
    plain = options(completion())
    assert (plain.logprobs, plain.prompt_logprobs, plain.logit_bias, plain.repetition_penalty) == (None, None, (), 1.0)
    assert options(completion(), SamplingDefaults.read({"repetition_penalty": 1.1})).repetition_penalty == 1.1


def test_log_probabilities_in_both_forms() -> None:
    for value, read in ((0, 0), (20, 20), (True, 1), (False, None), (None, None)):
        assert options(completion(logprobs=value)).logprobs == read
    assert options(chat(logprobs=True)).logprobs == 0
    assert options(chat(logprobs=True, top_logprobs=20)).logprobs == 20
    assert options(chat(top_logprobs=0)).logprobs is None
    assert options(completion(echo=True, logprobs=3)).prompt_logprobs == 3
    assert options(completion(echo=True, logprobs=3, prompt_logprobs=5)).prompt_logprobs == 5
    assert options(completion(echo=True)).prompt_logprobs is None


def test_scoring_alone_draws_one_token_to_drop() -> None:
    for asked in (
        completion(max_tokens=0, echo=True),
        completion(max_tokens=0, prompt_logprobs=0),
        chat(max_completion_tokens=0, prompt_logprobs=1),
    ):
        found = options(asked)
        assert (found.max_tokens, found.scores_only) == (1, True)
    assert not options(completion(max_tokens=1, echo=True)).scores_only


def test_the_best_of_some_samples() -> None:
    asked = completion(n=2, best_of=5)
    found = options(asked)
    assert (found.n, found.logprobs) == (5, 0)
    assert (options(completion(n=3)).n, options(completion(n=3)).logprobs) == (3, None)
    assert options(completion(n=2, best_of=2)).logprobs is None


@pytest.mark.parametrize(
    ("ask", "fields", "field", "told"),
    [
        (completion, {"best_of": 2, "n": 3}, "best_of", "below n 3"),
        (completion, {"best_of": 2, "stream": True}, "best_of", "not with stream"),
        (completion, {"max_tokens": 0}, "max_tokens", "asks for nothing"),
        (chat, {"max_tokens": 0}, "max_tokens", "asks for nothing"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens", "asks for nothing"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (chat, {"logprobs": 3}, "logprobs", "boolean"),
        (completion, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 tokens"),
        (completion, {"logit_bias": {"5.0": 1}}, "logit_bias", "not a token id"),
        (completion, {"logit_bias": {"5": 100.5}}, "logit_bias", "from -100 to 100"),
        (completion, {"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
        (chat, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "no function 'g'"),
        (chat, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be none, auto, required"),
        (chat, {"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        (chat, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        (chat, {"continue_final_message": True}, "continue_final_message", "assistant"),
        (chat, {"continue_final_message": True, "messages": [*USER, *CALLED]}, "continue_final_message", "with calls"),
        (chat, {"continue_final_message": True, "messages": [*USER, SILENT]}, "continue_final_message", "has no text"),
        (chat, {"reasoning_effort": "huge"}, "reasoning_effort", "low"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other(ask: Any, fields: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        ask(**fields)
        # What depends on the messages shows when they are put together.
        ask(**fields).chat()
    assert caught.value.field == field


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]


def test_tools_reach_the_template_unless_they_must_not_be_called() -> None:
    asked = chat(tools=TOOLS)
    assert (asked.choice, list(asked.chat().tools)) == ("auto", TOOLS)
    assert chat(tools=TOOLS, tool_choice="none").chat().tools == ()
    named = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.choice == "function:f" and named.chat().tools == tuple(TOOLS)
    assert (chat().choice, chat(tools=[]).choice) == ("none", "none")
    with pytest.raises(InvalidRequestError, match="twice"):
        chat(tools=[*TOOLS, *TOOLS])


def test_past_calls_have_their_arguments_as_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}

    told = ('{"a": null}', '{"a": [1]}', "", None, "no json", {"b": None}, r'{"c": "\ud800"}')
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call(a) for a in told]}]
    (_, message) = chat(messages=messages).chat().messages
    assert message["content"] == ""
    read = [c["function"]["arguments"] for c in message["tool_calls"]]
    assert read == [{"a": None}, {"a": [1]}, {}, {}, "no json", {"b": None}, r'{"c": "\ud800"}']


def test_what_the_template_is_told_beside_the_messages() -> None:
    asked = chat(reasoning_effort="low", chat_template_kwargs={"x": 1}, documents=[{"text": "d"}])
    found = asked.chat()
    assert found.kwargs == {"reasoning_effort": "low", "x": 1} and found.documents == ({"text": "d"},)
    off = chat(reasoning_effort="none", chat_template_kwargs={"thinking": True}).chat()
    assert off.kwargs == {"reasoning_effort": "none", "enable_thinking": False, "thinking": True}
    going = chat(messages=[*USER, {"role": "assistant", "content": "so"}], continue_final_message=True)
    assert (going.chat().continue_final_message, going.chat().add_generation_prompt) == (True, False)
    with pytest.raises(InvalidRequestError, match="not together"):
        chat(
            messages=[*USER, {"role": "assistant", "content": "so"}],
            continue_final_message=True,
            add_generation_prompt=True,
        ).chat()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_KINDS = (CompletionRequest, ChatRequest, GenerateRequest, TokenizeRequest, DetokenizeRequest)


@given(st.data())
def test_any_json_is_read_or_refused_by_name(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(_KINDS))
    fields = st.sampled_from([*kind.model_fields, *UNSUPPORTED, *ELSEWHERE])
    body: Any = data.draw(st.dictionaries(fields, _JSON, max_size=4))
    if "model" in kind.model_fields:
        body.setdefault("model", "default")
    if "prompt" in kind.model_fields:
        body.setdefault("prompt", "a")
    if "messages" in kind.model_fields:
        body.setdefault("messages", USER)
    try:
        asked = parse_request(kind, orjson.dumps(body))
        if isinstance(asked, SamplingRequest):
            options(asked)
    except InvalidRequestError as exc:
        assert exc.field.split(".")[0].split("[")[0] in {*kind.model_fields, *UNSUPPORTED, *ELSEWHERE}
