"""Where chat templates come from, what is said when one refuses, and that none runs for ever; and BOS, once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, processors
from transformers import AutoTokenizer

from engine_core.types.errors import ConfigError, InvalidRequestError
from services.router.text.chat_template import ChatTemplate, TemplateTimeError
from services.router.text.template_files import own_names
from services.router.text.tokenizer import RouterTokenizer
from tests.support.fake_decode import FakeDecode, error_of, running_router, says
from tests.support.models import tiny_model

SYSTEM, USER, ASSISTANT = ({"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant"))
CHAT = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": " again "}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FOREVER = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


def model(folder: Path, config: dict[str, Any], **files: str) -> Path:
    """A tokenizer's directory with these templates."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((tiny_model() / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    for name, text in files.items():
        place = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (folder / f"{place}.jinja").write_text(text)
    return folder


# ---- where from ---------------------------------------------------------------------------------------


def test_pdmeshs_own_templates_render_as_they_do_in_transformers() -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_model())
    folder = Path(__file__).parents[3] / "services" / "router" / "text" / "templates"
    assert own_names() == sorted(path.stem for path in folder.iterdir())
    for name in own_names():
        ours = RouterTokenizer.load(tiny_model(), name)
        source = (folder / f"{name}.jinja").read_text()
        for generate in (True, False):
            text = ours.render_chat(CHAT, add_generation_prompt=generate)
            assert text == theirs.apply_chat_template(
                CHAT, chat_template=source, add_generation_prompt=generate, tokenize=False
            )
        assert "again" in text


def test_own_templates_write_what_their_models_were_taught() -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    wanted = {
        "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]",
        "mistral": "<s>[INST] S\n\nU [/INST]",
        "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\n",
        "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n",
        "plain": "System: S\n\nUser: U\n\nAssistant:",
        "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    }
    assert sorted(wanted) == own_names()
    folder = Path(__file__).parents[3] / "services" / "router" / "text" / "templates"
    for name, text in wanted.items():
        template = ChatTemplate((folder / f"{name}.jinja").read_text(), config)
        assert template.render([SYSTEM, USER]) == text, name


def test_templates_of_the_model_by_name(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "listed"}, {"name": "rag", "template": "rag"}]
    root = model(tmp_path / "a", {"chat_template": listed}, tool_use="tools", short="short")
    ours = RouterTokenizer.load(root)
    assert ours.render_chat(CHAT) == "listed" and ours.render_chat(CHAT, tools=[TOOL]) == "tools"
    assert AutoTokenizer.from_pretrained(root).apply_chat_template(CHAT, tools=[TOOL], tokenize=False) == "tools"
    for name, text in (("rag", "rag"), ("short", "short"), ("tool_use", "tools")):
        chosen = RouterTokenizer.load(root, name)
        assert chosen.render_chat(CHAT) == chosen.render_chat(CHAT, tools=[TOOL]) == text
    assert RouterTokenizer.load(model(tmp_path / "a", {}, default="own")).render_chat(CHAT) == "own"
    (tmp_path / "mine.jinja").write_text("from a file")
    assert RouterTokenizer.load(root, str(tmp_path / "mine.jinja")).render_chat(CHAT) == "from a file"
    bare = RouterTokenizer.load(model(tmp_path / "b", {}))
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequestError, match="this model has no chat template"):
        bare.render_chat(CHAT)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("chatmll", r"neither a file nor a template's name; there are chatml, default, gemma, .*zephyr"),
        ("broken.jinja", r"the chat template default of .*broken.jinja cannot be compiled: "),
        ("latin.jinja", r"latin.jinja cannot be read: "),
    ],
)
def test_templates_that_are_none_end_the_router_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=said):
        RouterTokenizer.load(tiny_model(), chosen)


# ---- refusals -----------------------------------------------------------------------------------------

TURNS = (
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("before", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("after", [0, 1, 9])
def test_the_message_that_a_template_refuses_is_named(before: int, after: int) -> None:
    good = [USER if i % 2 == 0 else ASSISTANT for i in range(before)]
    wrong = ASSISTANT if before % 2 == 0 else USER
    with pytest.raises(InvalidRequestError, match=rf"refuses messages\[{before}\]: roles must take turns") as caught:
        ChatTemplate(TURNS, {}).render([*good, wrong, *[USER] * after])
    assert caught.value.field == f"messages[{before}]"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("{{ raise_exception('never') }}", "messages"),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}", "messages"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "messages[0]"),
        ("{% for m in messages %}{{ m.nothing.more }}{% endfor %}", "messages[0]"),
        ("{% for m in messages %}{{ 1 // (3 - loop.index) }}{% endfor %}", "messages[2]"),
        ("{{ messages.append(1) }}", "messages"),
        ("{{ messages.__class__.__mro__ }}", "messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "messages"),
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_bad_request(source: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source + "{{ tools }}", {}).render(CHAT, tools=[TOOL])
    assert (type(caught.value), caught.value.field) == (InvalidRequestError, field), caught.value


# ---- bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        FOREVER,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='') %}{% for a in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    ],
)
def test_templates_that_never_end_are_ended(source: str) -> None:
    began = time.monotonic()
    with pytest.raises((TemplateTimeError, InvalidRequestError), match="too much for the chat template"):
        ChatTemplate(source, {}).render(CHAT, seconds=0.1)
    assert time.monotonic() - began < 20.0  # it would take years


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'a' }}",
        "{{ [0] * (2 ** 60) }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set x = 'a' * 10000 %}{% for a in range(100000) %}{{ x }}{% endfor %}",
    ],
)
def test_templates_that_write_without_end_are_ended(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="too much for the chat template") as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert type(caught.value) is InvalidRequestError


def test_what_templates_may_multiply() -> None:
    source = "{{ '=' * 20 }}{{ 6 * 7 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}{{ [1] * 2 }}"
    assert ChatTemplate(source, {}).render(CHAT) == "=" * 20 + "4210243.00.5[1, 1]"


async def test_a_slow_template_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    root = model(tmp_path / "m", {}, default=FOREVER)
    ours = RouterTokenizer.load(root)
    turns, running = 0, asyncio.create_task(ours.render_chat_async(CHAT, seconds=0.5))
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(TemplateTimeError):
        running.result()
    assert turns > 100
    ours.close()


async def test_long_chats_are_rendered_alike() -> None:
    ours = RouterTokenizer.load(tiny_model())
    chat = [USER, {"role": "assistant", "content": "word " * 5000}, USER]
    assert await ours.render_chat_async(chat) == ours.render_chat(chat)
    with pytest.raises(InvalidRequestError):
        await ours.render_chat_async(chat, template=TURNS.replace("'user'", "'nobody'"))
    ours.close()


async def test_clients_hear_which_message_it_was(tmp_path: Path) -> None:
    (tmp_path / "turns.jinja").write_text(TURNS)
    fake = FakeDecode(says([5]))
    async with running_router(tiny_model(), fake, chat_template=str(tmp_path / "turns.jinja")) as router:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await router.http.post(
                path, json={"model": "default", "messages": [USER, ASSISTANT, ASSISTANT, USER]}
            )
            error = error_of(response)
            assert (response.status_code, error["param"], error["type"]) == (
                400,
                "messages[2]",
                "invalid_request_error",
            )
            assert error["message"] == "the chat template refuses messages[2]: roles must take turns"
        good = await router.http.post(
            "/v1/chat/completions", json={"model": "default", "messages": [USER], "max_tokens": 1}
        )
        assert good.status_code == 200
        assert router.tokenizer.decode(list(fake.requests[0].request.prompt_token_ids)) == "U"


# ---- BOS ----------------------------------------------------------------------------------------------


def with_bos(*, both: bool = False) -> RouterTokenizer:
    """A tokenizer that puts <s> before each text, and with `both` </s> behind it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "</s>"])
    single = "<s> $A </s>" if both else "<s> $A"
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return RouterTokenizer(
        backend, {"default": ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})}
    )


@pytest.mark.parametrize("both", [False, True])
async def test_there_is_one_bos(both: bool) -> None:
    ours, end = with_bos(both=both), [2] if both else []
    for text, bare in (("ab", [3, 4]), ("", []), ("<s>ab", [3, 4]), ("<s>", []), ("a<s>", [3, 1])):
        assert ours.encode(text) == await ours.encode_async(text) == [1, *bare, *end], text
    long = "<s>" + "ab" * 3000
    assert (await ours.encode_async(long))[:3] == ours.encode(long)[:3] == [1, 3, 4]
    assert ours.encode("<s><s>a") == [1, 1, 3, *end]  # who writes two gets two
    chat = ours.render_chat([{"role": "user", "content": "ab"}])
    assert ours.encode(chat, add_special_tokens=False) == [1, 3, 4]
    assert ours.encode(chat) == [1, 3, 4, *end]
    ours.close()


def test_what_ends_a_text_is_no_bos() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "a": 2}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.add_special_tokens(["</s>"])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    ours = RouterTokenizer(backend, None)
    assert [ours.encode(text) for text in ("", "a", "</s>", "</s>a")] == [[1], [2, 1], [1, 1], [1, 2, 1]]
