"""What compiles, what is refused and in which words, and where JSON may hold whitespace."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from random import Random

import llguidance
import pytest

from engine_core.grammar.compiler import compile_grammar, load_vocabulary, spelt_out, tokens_of, try_out
from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from tests.support.models import tiny_model

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
OBJECT = '{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}}},"required":["a"]}'


@functools.cache
def vocabulary() -> llguidance.LLTokenizer:
    return load_vocabulary(tiny_model(), (END_OF_TEXT, IM_END))


def matches(grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole output."""
    matcher = compile_grammar(vocabulary(), grammar)
    ids = vocabulary().tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, OBJECT), '{"a":[1,2]}', '{"a":["1"]}'),
        (Grammar(GrammarKind.REGEX, "[a-c]+/é?"), "abc/é", "abd/"),
        (Grammar(GrammarKind.LARK, 'start: WORD ("," WORD)*\nWORD: "yes" | "no"'), "yes,no", "yes,"),
    ],
)
def test_each_kind_takes_what_matches_it_as_a_whole(grammar: Grammar, good: str, bad: str) -> None:
    assert matches(grammar, good)
    assert not matches(grammar, bad)
    assert not matches(grammar, good + "}")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a": [1, 2]}', True),
        ('{"a":[1,2]}', True),
        ('{"a":  [1]}', False),
        ('{ "a":[1]}', False),
        ('{"a":[1 ,2]}', False),
        ('{\n"a":[1]}', False),
        ('{"a":[1]} ', False),
    ],
)
def test_one_space_behind_a_separator_is_all_whitespace(text: str, *, allowed: bool) -> None:
    assert matches(Grammar(GrammarKind.JSON_SCHEMA, OBJECT), text) == allowed


def test_every_token_that_ends_an_output_is_allowed_at_the_end_and_competes_before() -> None:
    matcher = compile_grammar(vocabulary(), Grammar(GrammarKind.REGEX, "ab?"))
    ends = {END_OF_TEXT, IM_END}
    a, b = (vocabulary().tokenize_str(c)[0] for c in "ab")
    assert set(tokens_of(matcher.compute_bitmask())) == {a}
    matcher.consume_token(a)
    assert set(tokens_of(matcher.compute_bitmask())) == {b, *ends}
    matcher.consume_token(b)
    assert set(tokens_of(matcher.compute_bitmask())) == ends


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"strin"}'), "Invalid type: strin"),
        (
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","uniqueItems":true}'),
            'Unimplemented keys: ["uniqueItems"]',
        ),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":'), "EOF while parsing"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"minimum":5,"maximum":2,"type":"integer"}'), "Unsatisfiable schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"http://localhost/x"}'), "not present in a registry"),
        (Grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
        (Grammar(GrammarKind.REGEX, "(?=a)a"), "look-around"),
        (Grammar(GrammarKind.LARK, "start: nowhere"), 'unknown name: "nowhere"'),
        (Grammar(GrammarKind.LARK, "start: <nowhere>"), "unknown special token"),
        (Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)), f"at most {MAX_GRAMMAR_BYTES} are allowed"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compile_grammar(vocabulary(), grammar)
    assert reason in refused.value.message
    assert refused.value.field == "grammar"
    assert "\n" not in refused.value.message and len(refused.value.message) < 450


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"$ref":"#"}', "nothing matches the grammar"),
        (
            json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(1200)}}),
            "Current row has",
        ),
    ],
)
def test_what_can_be_compiled_but_not_followed_shows_at_the_first_tokens(text: str, reason: str) -> None:
    matcher = compile_grammar(vocabulary(), Grammar(GrammarKind.JSON_SCHEMA, text))
    with pytest.raises(InvalidRequestError, match=reason):
        try_out(vocabulary(), matcher)


def test_trying_out_leaves_the_matcher_where_it_was() -> None:
    matcher = compile_grammar(vocabulary(), Grammar(GrammarKind.REGEX, "[ab]{30}"))
    before = matcher.compute_bitmask()
    try_out(vocabulary(), matcher)
    assert matcher.compute_bitmask() == before


def test_special_tokens_stand_in_grammars_by_name() -> None:
    matcher = compile_grammar(vocabulary(), Grammar(GrammarKind.LARK, 'start: <|im_start|> "a"'))
    assert list(tokens_of(matcher.compute_bitmask())) == [IM_START]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, r"([A-Za-z]{1,14} ){9}[a-zA-Z ,.]{40}"),
        Grammar(GrammarKind.LARK, 'start: (WORD " ")* "!"\nWORD: /[a-z]{1,9}/'),
        Grammar(
            GrammarKind.JSON_SCHEMA,
            '{"type":"array","minItems":9,"items":{"anyOf":[{"type":"string","maxLength":7},'
            '{"type":"string","pattern":"^[A-Za-z0-9 ._-]{1,30}$"},{"type":"object"}]}}',
        ),
    ],
)
def test_masks_are_what_looking_at_every_token_gives(grammar: Grammar) -> None:
    plain = vocabulary().with_slices([])
    for seed in range(3):
        matcher, slow, random = compile_grammar(vocabulary(), grammar), compile_grammar(plain, grammar), Random(seed)
        for _ in range(80):
            mask = matcher.compute_bitmask()
            assert mask == slow.compute_bitmask()
            token = int(random.choice(tokens_of(mask)))
            assert matcher.consume_token(token) and slow.consume_token(token)
            if matcher.is_stopped():
                break


FAR = "ab" * 50
SPELT = [
    *(
        (Grammar(GrammarKind.REGEX, rf"{FAR[:distance]}<\|{name}\|>b"), f"{FAR[:distance]}<|{name}|>b")
        for distance in (0, 1, 12, 13, 100)
        for name in ("im_start", "im_end", "endoftext")
    ),
    (Grammar(GrammarKind.REGEX, r"<\|im_end\|>"), "<|im_end|>"),
    (Grammar(GrammarKind.LARK, f'start: "{FAR}" "<|im_start|><|im_end|>"'), f"{FAR}<|im_start|><|im_end|>"),
    (Grammar(GrammarKind.JSON_SCHEMA, f'{{"const":["{FAR}","<|im_end|>"]}}'), f'["{FAR}","<|im_end|>"]'),
    (Grammar(GrammarKind.JSON_SCHEMA, f'{{"enum":["{FAR}é<|im_start|>é"]}}'), f'"{FAR}é<|im_start|>é"'),
    (
        Grammar(GrammarKind.JSON_SCHEMA, r'{"type":"string","pattern":"^a{30}<\\|im_end\\|>$"}'),
        f'"{"a" * 30}<|im_end|>"',
    ),
]


def followed(words: llguidance.LLTokenizer, grammar: Grammar) -> list[int]:
    """The output that takes the first token that is allowed, at every step."""
    matcher, output = compile_grammar(words, grammar), list[int]()
    while not matcher.is_stopped():
        allowed = tokens_of(matcher.compute_bitmask())
        taken = spelt_out(words, matcher, int(allowed[0])) if allowed.size == 1 else int(allowed[0])
        assert taken is not None and matcher.consume_token(taken), (output, taken)
        output.append(taken)
    assert matcher.is_accepting()
    return output[:-1] if output[-1] in words.eos_tokens else output


@pytest.mark.parametrize(("grammar", "text"), SPELT)
def test_what_is_spelt_like_a_special_token_is_written_with_others(grammar: Grammar, text: str) -> None:
    try_out(vocabulary(), compile_grammar(vocabulary(), grammar))
    output = followed(vocabulary(), grammar)
    assert vocabulary().decode_str(output).replace(": ", ":").replace(", ", ",") == text
    assert not {END_OF_TEXT, IM_START, IM_END} & set(output)


def test_a_special_token_that_the_grammar_names_is_itself_beside_its_spelling() -> None:
    grammar = Grammar(GrammarKind.LARK, 'start: "a" <|im_start|> "<|im_start|>" <|im_end|>')
    try_out(vocabulary(), compile_grammar(vocabulary(), grammar))
    output = followed(vocabulary(), grammar)
    assert output.count(IM_START) == 1 and output[1] == IM_START
    assert vocabulary().decode_str(output) == "a<|im_start|><|im_start|>"


def test_what_a_normaliser_would_change_is_written_as_it_is(tmp_path: Path) -> None:
    tokenizer = json.loads((tiny_model() / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = load_vocabulary(tmp_path, (IM_END,))
    for text in ("xe\u0301y", "\u1112\u1161\u11ab"):
        grammar = Grammar(GrammarKind.LARK, f'start: "{text}"')
        try_out(words, compile_grammar(words, grammar))
        assert words.decode_str(followed(words, grammar)) == text


def test_text_that_the_vocabulary_has_no_bytes_for_is_refused(tmp_path: Path) -> None:
    tokenizer = json.loads((tiny_model() / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["merges"] = []
    model["vocab"] = {token: i for token, i in model["vocab"].items() if "q" not in token}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = load_vocabulary(tmp_path, (IM_END,))
    with pytest.raises(InvalidRequestError, match="grammar"):
        try_out(words, compile_grammar(words, Grammar(GrammarKind.LARK, 'start: "aq"')))


def test_a_model_with_more_logits_than_tokens_has_masks_for_all() -> None:
    wide = load_vocabulary(tiny_model(), (IM_END,), 400)
    assert wide.vocab_size == 400
    allowed = tokens_of(compile_grammar(wide, Grammar(GrammarKind.REGEX, "(?s:.*)")).compute_bitmask())
    assert allowed.max() < 325 and IM_END in allowed


@pytest.mark.parametrize(("content", "reason"), [(None, "has no tokenizer.json"), ('{"model":{}}', "can't be used")])
def test_a_model_whose_tokenizer_cannot_be_read_refuses_grammars_by_name(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        load_vocabulary(tmp_path, (IM_END,))
    assert refused.value.field == "grammar"
