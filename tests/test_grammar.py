"""Replies by a schema: whatever a model would like to write, what comes out parses and satisfies the schema.

Random models and random choices are the hardest case: their text is garbage, and nothing in them wants to end.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from continuous import STRONG, alone, by_full_forwards, endless, running, tiny_lm
from reference import END, prompt_of, push, run_together
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from traitbasis import grammar as grammar_module
from traitbasis.embedded import DEFAULT_MODEL, fetch
from traitbasis.engines.base import WRAP_UP_TOKENS, Request, Sampling
from traitbasis.errors import EngineError, RequestError
from traitbasis.grammar import Grammar, json_grammar, tagged_grammar


def an_object(required: Sequence[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties if required is None else required)}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TEXTS = {"type": "array", "items": TEXT}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "any object": None,
    "deepeval's turn": an_object(simulated_input=TEXT),
    "deepeval's judge": an_object(is_complete={"type": "boolean"}, reason=TEXT),
    "sotopia's action": an_object(
        action_type={"type": "string", "enum": ["none", "speak", "non-verbal communication", "action", "leave"]},
        argument=TEXT,
        to=TEXTS,
    ),
    "nested": an_object(
        a=an_object(b=an_object(c={"type": "array", "items": an_object(d=TEXT)}), e={"type": "array", "items": WHOLE}),
    ),
    "optional": an_object(["y"], x=TEXT, y=WHOLE, z=an_object([], u=TEXT, v={"type": "null"})),
    "closed": {**an_object([], x=NUMBER), "additionalProperties": False},
    "numbers": an_object(
        i=WHOLE, n=NUMBER, p={"type": "integer", "minimum": 1, "maximum": 365}, q={"type": "number", "minimum": 0}
    ),
    "anyOf": {"anyOf": [TEXT, WHOLE, {"type": "array", "items": {"anyOf": [{"type": "boolean"}, an_object(x=TEXT)]}}]},
    "types": {"type": ["number", "null", "array"], "items": NUMBER},
    "a map": {"type": "object", "additionalProperties": {"type": "array", "items": TEXT, "minItems": 2}},
    "a tree": an_object(name=TEXT, children={"type": "array", "items": {"$ref": "#"}}),
    "a chain": an_object(value=TEXT, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "bounded": an_object(
        s={"type": "string", "minLength": 4, "maxLength": 9}, a={"type": "array", "items": WHOLE, "minItems": 3}
    ),
    "pattern": an_object(order={"type": "string", "pattern": "^#W[0-9]{7}$"}, day={"type": "string", "format": "date"}),
    "pydantic's": {
        "$defs": {"Money": {"title": "Money", **an_object(amount=NUMBER, currency={"const": "EUR"})}},
        "title": "Refund",
        **an_object(
            ["total"],
            total={"$ref": "#/$defs/Money"},
            note={"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "Note", "description": "why"},
        ),
    },
    "awkward names": an_object(**{'a"b\\\n': TEXT, "é€😀": WHOLE, "": {"enum": [{"x": [1, None]}, 1.5, "</s>"]}}),
    "a bare number": NUMBER,
    "a bare text": TEXT,
}
TOKENIZER = tiny_tokenizer()


def assert_satisfies(text: str, schema: Mapping[str, Any] | None) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    jsonschema.validate(value, {"type": "object"} if schema is None else schema)
    text.encode()  # no half of a surrogate pair
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


# --- through the engine ---


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_what_a_random_model_says_satisfies_any_schema(architecture: str, temperature: float) -> None:
    """All schemas together with 1, 5, 20 and 60 tokens, beside unguided steered rows, which say what they say alone;
    the guided rows' additions come to nothing (contract 10)."""
    lm, rows = tiny_lm(architecture), []
    for number, schema in enumerate(SCHEMAS.values()):
        grammar = json_grammar(lm.tokenizer, schema)
        for max_tokens in (1, 5, 20, 60):
            sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
            prompt, additions = prompt_of(8 + max_tokens % 7, number), push(1, STRONG)
            rows.append((schema, Request(prompt, 5, sampling, frozenset({END}), additions, guide=grammar.guide)))
    mates = [endless(prompt_of(9 + i), 60, additions=push(2, STRONG)) for i in range(2)]
    with running(lm, max_batch=40) as engine:
        first, *found, last = run_together(engine, [mates[0], *(request for _, request in rows), mates[1]])
        assert engine.stats().steered_tokens == 120
    assert [first.token_ids, last.token_ids] == [by_full_forwards(lm, mate) for mate in mates]
    finishes = set()
    for (schema, request), generation in zip(rows, found, strict=True):
        assert_satisfies(generation.text, schema)
        finishes.add(generation.finish)
        assert len(generation.token_ids) - request.sampling.max_tokens <= 120
        assert generation.finish == "length" or len(generation.token_ids) <= request.sampling.max_tokens
        inside = [token for token in generation.token_ids if token < 3]
        assert inside in ([], [END]) and generation.token_ids[-1:] == tuple(inside or generation.token_ids[-1:])
    assert finishes == {"stop", "length"}


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_row_by_a_schema_is_the_same_alone_and_in_a_crowd(architecture: str) -> None:
    """Contract 9, with replies that share one grammar and what its parser has learned."""
    lm = tiny_lm(architecture)
    requests = []
    for seed in range(9):
        grammar = json_grammar(lm.tokenizer, SCHEMAS[("sotopia's action", "any object", "nested")[seed % 3]])
        sampling = Sampling(temperature=1.0, max_tokens=6 + 5 * seed)
        requests.append(Request(prompt_of(9 + seed), seed, sampling, frozenset({END}), guide=grammar.guide))
    expected = [alone(lm, request) for request in requests]
    with running(lm, max_batch=5) as engine:
        assert run_together(engine, requests) == expected
        assert run_together(engine, requests[::-1]) == expected[::-1]


# --- any choice, not only a model's ---


def anything(allowed: Tensor, rng: random.Random) -> int:
    """Any of the allowed tokens."""
    ids = allowed.nonzero()[:, 0]
    return int(ids[rng.randrange(len(ids))])


def eager_for(wished: Iterable[int], tokenizer: Any, how_much: float) -> Callable[[Tensor, random.Random], int]:
    """Mostly a wished token, where one is allowed."""
    wishes = torch.zeros(len(tokenizer), dtype=torch.bool)
    wishes[list(wished)] = True

    def choose(allowed: Tensor, rng: random.Random) -> int:
        found = allowed & wishes
        return anything(found if found.any() and rng.random() < how_much else allowed, rng)

    return choose


def write(
    grammar: Grammar,
    rng: random.Random,
    max_tokens: int,
    choose: Callable[[Tensor, random.Random], int] = anything,
    see: Callable[[Tensor], None] = lambda allowed: None,
) -> tuple[list[int], bool, int]:
    """What a guide lets `choose` write; whether it is whole, and how many tokens it took beyond max_tokens."""
    guide, tokens = grammar.guide(), list[int]()
    while not guide.done and len(tokens) < max_tokens + WRAP_UP_TOKENS:
        if len(tokens) == max_tokens and not guide.wrap_up():
            break
        allowed = guide.allowed()
        assert allowed is not None
        see(allowed)
        tokens.append(choose(allowed, rng))
        guide.take(tokens[-1])
    return tokens, guide.done or not guide.wrap_up(), max(0, len(tokens) - max_tokens)


@cache
def embedded_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(fetch(DEFAULT_MODEL))


@cache
def sentencepiece_like() -> Any:
    """Byte fallback and a mark for spaces, as in Llama 2 and Gemma."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, *'abcdefgh{}[]",:0123456789\\truelsn▁', '▁"', '"}', '":', "true", "▁the"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: TOKENIZER,
    "the embedded model's": embedded_tokenizer,
    "byte fallback": sentencepiece_like,
}


@cache
def texts_of(tokenizer: Any) -> dict[int, str]:
    return {token: tokenizer.decode([token]) for token in range(len(tokenizer))}


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_random_choices_give_satisfies_any_schema(tokenizer: str, name: str) -> None:
    """With whole vocabularies, where one token spans strings, commas and braces. No special token but the end ever."""
    known, schema = TOKENIZERS[tokenizer](), SCHEMAS[name]
    grammar, special = json_grammar(known, schema), [*{*known.all_special_ids} - {known.eos_token_id}]

    def see(allowed: Tensor) -> None:
        assert not allowed[special].any()

    for seed in range(6):
        tokens, whole, beyond = write(grammar, random.Random(seed), (1, 5, 20, 60, 100, 200)[seed], see=see)
        assert whole and beyond <= 120
        assert_satisfies(text_of(known, tokens), schema)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_only_single_spaces_stand_outside_of_strings(tokenizer: str) -> None:
    """After a comma or a colon, for a model that writes a space wherever it may."""
    known = TOKENIZERS[tokenizer]()
    spacious = eager_for([token for token, text in texts_of(known).items() if not text.strip()], known, 0.5)

    for seed, name in enumerate(("nested", "any object", "sotopia's action", "numbers")):
        tokens, _, _ = write(json_grammar(known, SCHEMAS[name]), random.Random(seed), 150, spacious)
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "x", text_of(known, tokens))
        assert not re.search(r"[\t\n\r]|  |(?<![,:]) ", bare), bare


def test_a_model_that_repeats_a_digit_or_wants_an_exponent_writes_numbers_that_are_finite() -> None:
    """Python reads no integer of 4301 digits, and 1e999 as infinity."""

    eager = eager_for([token for token, text in texts_of(TOKENIZER).items() if text in {*"eE9.+-"}], TOKENIZER, 0.9)

    for seed in range(25):
        schema = [NUMBER, WHOLE, {"type": "array", "items": NUMBER}, an_object(n=NUMBER, i=WHOLE), None][seed % 5]
        text = text_of(TOKENIZER, write(json_grammar(TOKENIZER, schema), random.Random(seed), 400, eager)[0])
        assert_satisfies(text, schema)
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', "x", text)
        numbers = re.findall(r"-?\d[\d.eE+-]*", bare)
        assert numbers or schema is None
        assert all(len(number) <= 24 and math.isfinite(float(number)) for number in numbers)


@pytest.mark.parametrize("name", ["any object", "anyOf", "types", "a map", "a tree", "a chain"])
def test_a_model_that_opens_whatever_it_can_is_wrapped_up_all_the_same(name: str) -> None:
    """What is open is closed, and nothing new is opened that need not be."""
    opening = eager_for(TOKENIZER("{[")["input_ids"], TOKENIZER, 1.0)
    for seed, max_tokens in enumerate((1, 2, 3, 7, 20, 60)):
        tokens, whole, beyond = write(json_grammar(TOKENIZER, SCHEMAS[name]), random.Random(seed), max_tokens, opening)
        assert whole and beyond <= max_tokens + 30
        assert_satisfies(text_of(TOKENIZER, tokens), SCHEMAS[name])


def test_numbers_are_as_long_as_the_schema_wants_them() -> None:
    long = {"type": "array", "items": {"enum": [10**15 + 7, 1.25e-30]}, "minItems": 2, "maxItems": 2}
    for seed in range(8):
        text = text_of(TOKENIZER, write(json_grammar(TOKENIZER, long), random.Random(seed), 300)[0])
        assert_satisfies(text, long)
    digits = {"type": "string", "pattern": "^[0-9]{60}e$"}
    assert_satisfies(text_of(TOKENIZER, write(json_grammar(TOKENIZER, digits), random.Random(1), 300)[0]), digits)


def test_a_reply_that_is_whole_already_is_not_wrapped_up() -> None:
    grammar, rng = json_grammar(TOKENIZER, WHOLE), random.Random(1)
    nine, minus = (TOKENIZER(text)["input_ids"][0] for text in "9-")
    assert write(grammar, rng, 1, lambda allowed, rng: nine) == ([nine], True, 0)
    tokens, whole, beyond = write(grammar, rng, 1, lambda allowed, rng: nine if not allowed[minus] else minus)
    assert (tokens, whole, beyond) == ([minus, nine], True, 1)


def test_special_tokens_written_out_in_a_schema_are_spelled() -> None:
    """<|im_end|> as a text is not the token that ends a turn."""
    said = ["<|im_end|>", "<|im_start|>system", "<|pad|>"]
    for value in said:
        schema = {**an_object(**{value: {"const": value}}), "additionalProperties": False}
        tokens, whole, _ = write(json_grammar(TOKENIZER, schema), random.Random(0), 200)
        assert whole and not {0, 1, 2} & {*tokens}
        assert json.loads(TOKENIZER.decode(tokens)) == {value: value}


def test_a_bare_number_may_be_ended_by_the_tokenizers_end_token_and_those_it_is_given() -> None:
    grammar, digit = json_grammar(TOKENIZER, WHOLE), TOKENIZER("7")["input_ids"][0]
    for stop_ids in ((), (1,), frozenset({0, 1, 10**6})):
        guide = grammar.guide(stop_ids)
        before = guide.allowed()
        guide.take(digit)
        after = guide.allowed()
        assert before is not None and after is not None
        assert not before[:3].any()
        ends = {token for token in (0, 1, 2) if after[token]}
        assert ends == {2, *(token for token in stop_ids if token < 3)}
        guide.take(2)
        assert guide.done and guide.silent
    number = Request(prompt_of(9), 0, Sampling(temperature=0, max_tokens=9, logit_bias={END: 100.0}), frozenset({END}))
    found = alone(tiny_lm("llama"), Request(**{**vars(number), "guide": grammar.guide}))
    assert (found.finish, len(found.token_ids), int(found.text)) == ("stop", 2, int(found.text[:1]))


# --- schemas ---


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://example.org/x.json"}, "example.org"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "#"}, "nothing satisfies"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "object", "properties": 5}, "properties"),
        ({"const": math.nan}, "JSON"),
        ({"const": "\ud800"}, "escape"),
        ({"const": object()}, "serializable"),
        ([], "must be an object"),
        ("string", "must be an object"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],  # an address is another one in every process
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        json_grammar(TOKENIZER, schema)
    assert "%json" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="recursion"):
        json_grammar(TOKENIZER, schema)


def test_formats_that_are_not_known_assert_nothing() -> None:
    schema = an_object(
        a={"type": "string", "format": "phone"},
        b={"anyOf": [{"type": "string", "format": "colour"}]},
        format={"const": {"format": "phone"}},
        day={"type": "string", "format": "date"},
    )
    for seed in range(4):
        value = assert_satisfies(
            text_of(TOKENIZER, write(json_grammar(TOKENIZER, schema), random.Random(seed), 60)[0]), schema
        )
        assert value["format"] == {"format": "phone"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["day"])


def test_options_of_the_parser_are_not_the_callers() -> None:
    loose = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, **an_object(a=TEXT)}
    guide = json_grammar(TOKENIZER, loose).guide()
    guide.take(TOKENIZER("{")["input_ids"][0])
    allowed = guide.allowed()
    assert allowed is not None
    assert allowed.nonzero()[:, 0].tolist() == TOKENIZER('"')["input_ids"]
    with pytest.raises(RequestError, match="uniqueItems"):
        json_grammar(TOKENIZER, {**loose, "uniqueItems": True})


def test_grammars_are_kept_by_schema_and_tokenizer_and_not_for_ever() -> None:
    schemas = [an_object(**{f"p{i}": TEXT}) for i in range(40)]
    first = json_grammar(TOKENIZER, schemas[0])
    assert json_grammar(TOKENIZER, json.loads(json.dumps(schemas[0]))) is first
    assert json_grammar(TOKENIZER, an_object(**{"p0": WHOLE})) is not first
    assert json_grammar(tiny_tokenizer(), schemas[0]) is not first
    a, b = an_object(a=TEXT, b=TEXT), an_object(b=TEXT, a=TEXT)
    texts = [text_of(TOKENIZER, write(json_grammar(TOKENIZER, s), random.Random(0), 40)[0]) for s in (a, b)]
    assert [text[2] for text in texts] == ["a", "b"]
    for schema in schemas[1:]:
        json_grammar(TOKENIZER, schema)
    assert json_grammar(TOKENIZER, schemas[0]) is not first


def test_guides_of_one_grammar_know_nothing_of_each_other() -> None:
    """Also in several threads at once."""
    grammar = json_grammar(TOKENIZER, SCHEMAS["nested"])
    expected = [write(grammar, random.Random(seed), 30) for seed in range(8)]
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        found[seed] = write(grammar, random.Random(seed), 30)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[seed] for seed in range(8)] == expected


@pytest.fixture
def small_lexer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from llguidance import LLParserLimits

    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    yield


def test_what_other_replies_taught_the_parser_fails_nobody(small_lexer: None) -> None:
    """Contract 9: the lexer that guides share is bounded. Each of many replies is that of a grammar of its own."""
    schema = {"type": "string", "maxLength": 150}

    def grammar() -> Grammar:
        return json_grammar(tiny_tokenizer(), schema)

    shared = grammar()
    for seed in range(30):
        found = write(shared, random.Random(seed), 60)
        assert found == write(grammar(), random.Random(seed), 60)
        assert_satisfies(text_of(TOKENIZER, found[0]), schema)


def test_a_grammar_that_is_too_much_for_the_parser_fails_its_own_request(small_lexer: None) -> None:
    grammar = json_grammar(tiny_tokenizer(), {"type": "string", "minLength": 900})
    with pytest.raises(EngineError, match="too many states"):
        write(grammar, random.Random(0), 2000)


def test_a_token_that_was_not_allowed_is_an_error() -> None:
    guide = json_grammar(TOKENIZER, None).guide()
    with pytest.raises(EngineError, match="not what the grammar allows"):
        guide.take(TOKENIZER("x")["input_ids"][0])


def test_a_tokenizer_that_cannot_be_followed_is_refused() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")))
    for tokenizer in (words, object.__new__(PreTrainedTokenizerFast.__mro__[1])):
        with pytest.raises(RequestError, match="byte-level"):
            json_grammar(tokenizer, None)


# --- tagged ---


def tagging(special: bool) -> Any:
    tokenizer = tiny_tokenizer()
    added = [AddedToken(content, special=special, normalized=False) for content in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(added, special_tokens=special)
    return tokenizer


def call_of(name: str, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str]:
    return f'<tool_call>\n{{"name": "{name}", "arguments": ', arguments, "}\n</tool_call>"


TOOLS = {
    "get_weather": an_object(["city"], city=TEXT, days=WHOLE),
    "get_weather_at": an_object(place=an_object(x=NUMBER, y=NUMBER)),
    "hang_up": {"type": "object", "properties": {}},
    "sets": {"type": "object", "properties": {"s": {"type": "array", "items": TEXT, "uniqueItems": True}}},
}


@pytest.mark.parametrize("special", [True, False])
def test_tagged_text_round_trips_whether_or_not_its_tags_are_special_tokens(special: bool) -> None:
    """A tag that is one token stands there as that token and no longer than one; inside the JSON there is none."""
    tokenizer = tagging(special)
    begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    grammar = tagged_grammar(tokenizer, [call_of(name, schema) for name, schema in TOOLS.items()])
    assert grammar.shown_ids == (frozenset({begin, end}) if special else frozenset())
    called = set()
    for seed in range(40):
        tokens, whole, beyond = write(grammar, random.Random(seed), (1, 10, 45, 80)[seed % 4])
        assert whole and beyond <= 120
        assert (tokens[0], tokens[-1]) == (begin, end)
        assert not {0, 1, 2, begin, end} & {*tokens[1:-1]}
        text = tokenizer.decode(tokens)
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")
        assert_satisfies(json.dumps(call["arguments"]), {**TOOLS[call["name"]], "uniqueItems": False})
        called.add(call["name"])
    assert called == {*TOOLS}


def test_tags_of_ordinary_text_and_of_none_are_followed_too() -> None:
    """Texts of all kinds of characters; quotes before the JSON do not confuse the wrapping up."""
    tokenizer = tagging(special=True)
    assert tagged_grammar(tokenizer, [("<[259]>", {"const": "<[260]> <tool_call>"}, "<tool")]).shown_ids == frozenset()
    texts = ["", "say \"it's\n", 'one " quote {[', "é€😀 \\d+ /x/ // # %json {", "\t<|im_end|", "<[3]> | x*"]
    for number, before in enumerate(texts):
        for after in ("", " ok", 'a " quote'):
            grammar = tagged_grammar(
                TOKENIZER, [(before, an_object(a=TEXT, b={"type": "array", "items": TEXT}), after)]
            )
            tokens, whole, beyond = write(grammar, random.Random(number), len(before.encode()) + 15)
            text = TOKENIZER.decode(tokens)
            assert whole and beyond <= 40
            assert text.startswith(before) and text.endswith(after)
            assert grammar.shown_ids == frozenset()
            value = json.loads(text.removeprefix(before).removesuffix(after))
            assert [*value] == ["a", "b"]


def test_a_tag_that_names_a_special_token_is_that_token() -> None:
    grammar = tagged_grammar(TOKENIZER, [("<|im_start|>call ", {"type": "null"}, "<|pad|>")])
    tokens, whole, _ = write(grammar, random.Random(0), 50)
    assert whole and tokens == TOKENIZER("<|im_start|>call null<|pad|>")["input_ids"]
    assert grammar.shown_ids == {0, 1}


@pytest.mark.parametrize("special", [True, False])
def test_a_tagged_reply_comes_out_of_the_engine_with_its_tags(special: bool) -> None:
    """With the tags in its text, stop ids in the tags or not; the model has more tokens than the tokenizer."""
    lm, tokenizer = tiny_lm("llama"), tagging(special)
    grammar = tagged_grammar(tokenizer, [call_of(name, schema) for name, schema in TOOLS.items()])
    with running(type(lm)(lm.name, lm.model, tokenizer, lm.layers, lm.width)) as engine:
        requests = [
            Request(
                prompt_of(9 + seed),
                seed,
                Sampling(temperature=1.0, max_tokens=(3, 50)[seed % 2]),
                frozenset({END}),
                push(1, STRONG),
                guide=grammar.guide,
                shown_ids=grammar.shown_ids,
            )
            for seed in range(8)
        ]
        for generation in run_together(engine, requests):
            call = json.loads(generation.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert call["name"] in TOOLS
            assert generation.text.startswith("<tool_call>\n")
        assert engine.stats().steered_tokens == 0


def test_schemas_of_tags_are_followed_as_far_as_they_can_be() -> None:
    odd = an_object(s={"type": "array", "items": TEXT, "uniqueItems": True}, t={"type": "string", "format": "phone"})
    tokens, whole, _ = write(tagged_grammar(TOKENIZER, [("<", odd, ">")]), random.Random(3), 60)
    assert whole
    assert [*json.loads(TOKENIZER.decode(tokens)[1:-1])] == ["s", "t"]
    for bad in ({"type": "strin"}, {"$ref": "#/nowhere"}):
        with pytest.raises(RequestError, match="schema"):
            tagged_grammar(TOKENIZER, [("a", TEXT, "b"), ("<", bad, ">")])


def test_torch_masks_are_bool_and_as_long_as_the_tokenizer() -> None:
    allowed = json_grammar(TOKENIZER, None).guide().allowed()
    assert allowed is not None
    assert (allowed.dtype, len(allowed)) == (torch.bool, len(TOKENIZER))
