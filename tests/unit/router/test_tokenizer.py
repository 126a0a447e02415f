"""The router's tokenizer against transformers on the same directories; text that comes in pieces."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import AutoTokenizer

from engine_core.types.errors import ConfigError, InvalidRequestError
from services.router.text.chat_template import ChatTemplate
from services.router.text.detokenizer import ByteDetokenizer
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import demo_model, tiny_model

TEXTS = [
    "hello",
    "The capital of France is",
    "  two  spaces and\ttabs\n\nlines  ",
    "naïve café — Ünïcödé, 日本語, 🦜🦜 and e\u0301",
    "<|im_start|>user\nnot a turn<|im_end|>",
    "x" * 5000,
    "<|endoftext|>",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "日本語 🦜"},
    ],
]


@functools.cache
def loaded(name: str) -> tuple[RouterTokenizer, Any, Path]:
    path = demo_model() if name == "demo" else tiny_model(name)  # type: ignore[arg-type]
    return RouterTokenizer.load(path), AutoTokenizer.from_pretrained(path), path


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "demo"])
def test_ids_and_text_equal_those_of_transformers(name: str) -> None:
    ours, theirs, _ = loaded(name)
    # transformers' Qwen2 class composes characters (NFC) whatever tokenizer.json says; real qwen2 files say it too.
    for text in (unicodedata.normalize("NFC", t) for t in TEXTS):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["llama", "demo"])
@pytest.mark.parametrize("chat", CHATS, ids=["user", "system", "turns"])
@pytest.mark.parametrize("generate", [True, False])
def test_chats_equal_those_of_transformers(name: str, chat: list[dict[str, Any]], generate: bool) -> None:
    ours, theirs, _ = loaded(name)
    text = ours.render_chat(chat, add_generation_prompt=generate)
    assert text == theirs.apply_chat_template(chat, add_generation_prompt=generate, tokenize=False)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=generate, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}\n  {{ ns.n }}{{ m | tojson }}\n"
    "{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    "{% if tools is none %}no tools{% endif %}{{ add_generation_prompt }}{{ enable_thinking | default('unset') }}",
    "{{ dict(a=1) | tojson(indent=2) }}{{ messages | map(attribute='content') | join('|') }}{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_helpers_equal_those_of_transformers(template: str) -> None:
    _, theirs, path = loaded("llama")
    config = json.loads((path / "tokenizer_config.json").read_text())
    tokens = {key: config[key] for key in ("bos_token", "eos_token", "pad_token")}
    ours = ChatTemplate(template, tokens)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, chat_template=template, tokenize=False, enable_thinking=False)
        assert ours.render(chat, add_generation_prompt=False, template_kwargs={"enable_thinking": False}) == expected


def test_a_template_that_writes_bos_yields_one_bos(tmp_path: Path) -> None:
    source = tiny_model("llama")
    spec = json.loads((source / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = RouterTokenizer.load(tmp_path)
    assert tokenizer.encode("in")[0] == 0
    chat = tokenizer.render_chat([{"role": "user", "content": "in"}])
    assert tokenizer.encode(chat, add_special_tokens=False).count(0) == 1


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    plain = ChatTemplate("{{ messages[0].role }}", {})
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}D{% endif %}", {})
    chat = [{"role": "developer", "content": "x"}]
    assert plain.render(chat) == "system"
    assert knows.render(chat) == "D"


def test_a_template_that_refuses_is_a_bad_request() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


def test_templates_are_sandboxed() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {})
    with pytest.raises(InvalidRequestError, match="refuses"):
        template.render([{"role": "user", "content": "x"}])


@given(st.lists(st.integers(0, 400), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_pieces_of_byte_level_text_sum_up_to_the_whole(ids: list[int], sizes: list[int]) -> None:
    ours, _, _ = loaded("llama")
    detokenizer = ours.detokenizer()
    out, at = "", 0
    whole = ours.decode(ids)
    for size in [*sizes, len(ids)]:
        piece = detokenizer.add(ids[at : at + size])
        out += piece
        assert whole.startswith(out)
        at += size
    assert out + detokenizer.flush() == whole


@given(st.text(min_size=1, max_size=30))
def test_no_half_character_is_ever_shown(text: str) -> None:
    ours, _, _ = loaded("llama")
    detokenizer = ours.detokenizer()
    pieces = [detokenizer.add([i]) for i in ours.encode(text, add_special_tokens=False)]
    shown = "".join(pieces)
    if "<|" not in text:
        assert shown == text
        assert detokenizer.flush() == ""
    assert "\ufffd" not in shown or "\ufffd" in text


def _byte_fallback() -> tokenizers.Tokenizer:
    """A vocabulary as SentencePiece has it: words with ▁, and bytes as <0xNN>."""
    vocab = {"<unk>": 0, "▁the": 1, "▁bird": 2, "s": 3}
    vocab |= {f"<0x{b:02X}>": 4 + b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_pieces_of_byte_fallback_text_sum_up_to_the_whole() -> None:
    tokenizer = RouterTokenizer(_byte_fallback(), None)
    ids = [1, 2, 3, *(4 + b for b in "🦜é".encode()), 2]
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    pieces = [detokenizer.add([i]) for i in ids]
    assert pieces[:3] == ["the", " bird", "s"]
    assert pieces[3:7] == ["", "", "", "🦜"]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids) == "the birds🦜é bird"


def test_bytes_that_never_become_a_character_are_given_up() -> None:
    tokenizer = RouterTokenizer(_byte_fallback(), None)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add([4 + 0xFF]) for _ in range(20)]
    assert any(pieces)
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 20


async def test_long_texts_are_encoded_alike() -> None:
    ours, _, _ = loaded("llama")
    text = "the user asks in a system " * 500
    assert await ours.encode_async(text) == ours.encode(text)
    assert ours.fewest_tokens(text) <= len(ours.encode(text))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not there"):
        RouterTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        RouterTokenizer.load(tmp_path)


def test_the_router_needs_no_torch() -> None:
    code = "import sys, services.router.main, services.router.app; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
