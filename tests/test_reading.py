"""Reading replies behind a kept context: compared with one plain forward of each conversation, without a cache."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from reference import Plain, hidden_in, hook_count, plain_forward, plain_reading, push, tokens_of
from tiny import LAYERS, SPECIALS, VOCABULARY, WIDTH, tiny_model, tiny_network, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from traitbasis.chat import As, Turn, render_prompt
from traitbasis.errors import ChatTemplateError
from traitbasis.model import LanguageModel, prepare_model
from traitbasis.reading import Reader, Reading

SHORT = (Turn("agent", "Hi?"),)
LONG = (
    Turn("system", "You are a customer with order W4417, a desk lamp."),
    Turn("agent", "Hello, how can I help you today?"),
    Turn("customer", "It is late."),
    Turn("agent", "Which order?"),
)
TURNS = [
    (LONG, "W4417, a lamp."),
    (SHORT, "No."),
    (LONG, "The lamp! Where is it, after all these weeks of waiting for it?"),
    (LONG, "x"),
    (SHORT, "Yes, it is about the lamp that I ordered, as you know very well by now."),
    (LONG, "W4417, a lamp."),  # again
]
# Two layers at once; the last one's states are seen by the final norm only.
ADDITIONS = push(1, 3.0) | push(LAYERS - 1, 2.0)
FAMILIES = ("llama", "qwen2", "gemma3", "gpt2")


def assert_equal(reading: Reading, plain: Plain) -> None:
    assert reading.states is not None and reading.norms is not None and reading.distributions is not None
    assert {t.dtype for t in (reading.logprobs, reading.states, reading.norms)} == {torch.float32}
    for name in ("logprobs", "states", "norms", "distributions"):
        expected = getattr(plain, name)
        np.testing.assert_allclose(
            getattr(reading, name), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(), err_msg=name
        )
    assert reading.surprise == pytest.approx(-plain.logprobs.mean(), rel=1e-4)


def read_all(reader: Reader, turns: Any, additions: Mapping[int, Tensor] | None = None) -> list[Reading]:
    return reader.read(turns, additions, states=True, distributions=True)


def same(one: Reading, other: Reading) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("logprobs", "states", "norms", "distributions")
    )


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("additions", [{}, ADDITIONS], ids=["plain", "steered"])
def test_a_reading_is_what_one_plain_forward_of_the_conversation_gives(
    architecture: str, additions: dict[int, Tensor]
) -> None:
    """Contract 4: the past is clean, the positions that produce the reply are steered, from the last prompt position
    on. Contexts are longer than gemma3's sliding window of 16, replies both shorter and longer."""
    lm = tiny_model(architecture)
    for reading, (context, text) in zip(read_all(Reader(lm), TURNS, additions), TURNS, strict=True):
        assert_equal(reading, plain_reading(lm, context, text, additions))
    assert hook_count(lm.model) == 0


def test_steering_changes_every_number_but_not_the_clean_context(lm: LanguageModel) -> None:
    """A positive control: were the additions not applied, or applied to the context, the test above would differ."""
    reader = Reader(lm)
    (plain,), (steered,) = read_all(reader, TURNS[:1]), read_all(reader, TURNS[:1], ADDITIONS)
    assert float((plain.logprobs - steered.logprobs).abs().max()) > 0.1
    assert plain.states is not None and steered.states is not None
    assert torch.equal(plain.states[0], steered.states[0]), "below the first steered layer nothing changes"
    assert not torch.allclose(plain.states[1], steered.states[1])


def test_one_addition_at_the_output_of_a_layer_moves_its_mean_state_by_itself(lm: LanguageModel) -> None:
    reader, addition = Reader(lm), push(2, 3.0)
    for plain, steered in zip(read_all(reader, TURNS), read_all(reader, TURNS, addition), strict=True):
        assert plain.states is not None and steered.states is not None
        torch.testing.assert_close(steered.states[2] - plain.states[2], addition[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("as_", ["user", "assistant"])
def test_a_reader_reads_under_its_header(lm: LanguageModel, as_: As) -> None:
    context, text = TURNS[0]
    (reading,) = read_all(Reader(lm, as_), [(context, text)])
    assert_equal(reading, plain_reading(lm, context, text, {}, as_))
    other: As = "assistant" if as_ == "user" else "user"
    assert reading.surprise != pytest.approx(plain_reading(lm, context, text, {}, other).logprobs.mean())


def test_what_is_not_asked_for_is_not_kept(lm: LanguageModel) -> None:
    (reading,) = Reader(lm).read(TURNS[:1])
    assert reading.states is reading.norms is reading.distributions is None
    assert reading.logprobs.shape == (len(TURNS[0][1]),)
    (reading,) = Reader(lm).read(TURNS[:1], states=True)
    assert reading.states is not None and reading.states.shape == (LAYERS, WIDTH)
    assert reading.norms is not None and reading.norms.shape == (LAYERS,) and reading.distributions is None
    (reading,) = Reader(lm).read(TURNS[:1], distributions=True)
    assert reading.distributions is not None and reading.distributions.shape == (len(TURNS[0][1]), VOCABULARY)


def test_the_mean_norm_is_no_norm_of_the_mean(lm: LanguageModel) -> None:
    (reading,) = read_all(Reader(lm), TURNS[2:3])
    assert reading.states is not None and reading.norms is not None
    assert bool((reading.norms > 1.05 * reading.states.norm(dim=-1)).all())


def test_no_turns_are_no_readings(lm: LanguageModel) -> None:
    assert Reader(lm).read([]) == []


# --- company and order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 2, 12])
def test_a_reading_does_not_depend_on_what_is_read_with_it(architecture: str, batch_size: int) -> None:
    lm = tiny_model(architecture)
    expected = [plain_reading(lm, context, text, ADDITIONS) for context, text in TURNS]
    order = list(range(len(TURNS)))
    for seed in range(2):
        random.Random(seed).shuffle(order)
        readings = read_all(Reader(lm, batch_size=batch_size), [TURNS[i] for i in order], ADDITIONS)
        for i, reading in zip(order, readings, strict=True):
            assert_equal(reading, expected[i])


def test_equal_turns_are_read_alike_wherever_they_stand(lm: LanguageModel) -> None:
    first, *_, last = read_all(Reader(lm), TURNS)
    assert same(first, last)
    listed = read_all(Reader(lm), [(list(context), text) for context, text in TURNS])  # contexts as lists
    assert same(listed[0], first)


def test_many_readings_leave_the_kept_contexts_as_they_were(lm: LanguageModel) -> None:
    """Contract 4: a steered reading's keys and values never reach the kept ones."""
    reader = Reader(lm, batch_size=2)
    before = read_all(reader, TURNS)
    kept = [tensor.clone() for tensor in kept_tensors(reader)]
    assert len(kept) == 2 * 2 * LAYERS, "keys and values of two contexts"
    for seed in range(3):
        reader.read(TURNS, push(1, 50.0, seed=seed), states=True)
        reader.read([(LONG, "A much longer reply than any before, so that slots would have to grow. " * 3)])
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_tensors(reader), strict=True))
    assert all(same(a, b) for a, b in zip(before, read_all(reader, TURNS), strict=True))


def kept_tensors(reader: Reader) -> list[Tensor]:
    layers = [layer for cache in reader._prefixes.values() for layer in cache.layers]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def test_a_context_is_computed_once_and_again_when_it_was_forgotten(lm: LanguageModel) -> None:
    lengths: list[int] = []

    def count(module: Any, arguments: Any, output: Any) -> None:
        lengths.append(hidden_in(output).shape[1])

    prompt = len(tokens_of(lm.tokenizer, render_prompt(lm.tokenizer, LONG, "user")))
    handle = lm.layers[0].register_forward_hook(count)
    try:
        reader = Reader(lm, batch_size=1)
        reader.read([(LONG, "one"), (LONG, "two")])
        reader.read([(LONG, "three")], ADDITIONS)
        assert sorted(lengths) == [4, 4, 6, prompt - 1], "each reply with the last prompt position before it"
        reader.forget()
        reader.read([(LONG, "one")])
        assert sorted(lengths)[-2:] == [prompt - 1] * 2
    finally:
        handle.remove()


def test_an_exception_leaves_nothing_behind(lm: LanguageModel) -> None:
    """Contract 6."""
    reader = Reader(lm)
    (before,) = read_all(reader, TURNS[:1])
    with pytest.raises(ChatTemplateError, match="cannot be found"):
        reader.read([*TURNS, (LONG, "  ")])
    with pytest.raises(IndexError, match="layer 9 does not exist"):
        reader.read(TURNS, {9: torch.zeros(WIDTH)}, states=True)
    with pytest.raises(RuntimeError):
        reader.read(TURNS, {1: torch.zeros(WIDTH + 1)}, states=True)
    assert hook_count(lm.model) == 0
    assert same(read_all(reader, TURNS[:1])[0], before)


# --- where prompt and reply meet --------------------------------------------------------------------------------------


def merging_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes with three merges, under a template that ends in a space: ``says Or`` is ``says`` + `` Or``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, "ĠO", "ĠOr", "de"]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("Ġ", "O"), ("ĠO", "r"), ("d", "e")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIALS[0], eos_token=SPECIALS[2])
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }} says {{ message['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant says {% endif %}"
    )
    return fast


@pytest.mark.parametrize("additions", [{}, ADDITIONS], ids=["plain", "steered"])
@pytest.mark.parametrize("batch_size", [1, 12])
def test_a_first_token_that_merges_with_the_prompt_is_read_with_it(
    additions: dict[int, Tensor], batch_size: int
) -> None:
    """In one batch: `` Or`` with the prompt's last space in it, `` O``, and a reply that begins a token of its own."""
    lm = prepare_model("merging", tiny_network("llama"), merging_tokenizer())
    texts = ["Order W1", "O no", "W1 de", "Or"]
    prompt = render_prompt(lm.tokenizer, SHORT, "user")
    assert prompt.endswith("user says ")
    alone = len(tokens_of(lm.tokenizer, prompt))
    readings = read_all(Reader(lm, batch_size=batch_size), [(SHORT, text) for text in texts], additions)
    lengths = []
    for reading, text in zip(readings, texts, strict=True):
        ids = tokens_of(lm.tokenizer, prompt + text)
        first = alone - 1 if text.startswith("O") else alone
        lengths.append(len(ids) - first)
        assert_equal(reading, plain_forward(lm, ids, first, additions))
    assert lengths == [6, 4, 4, 1]


@pytest.mark.parametrize("additions", [{}, ADDITIONS], ids=["plain", "steered"])
def test_what_stands_before_a_closed_thought_is_not_counted_whatever_stands_beside_it(
    additions: dict[int, Tensor],
) -> None:
    """The thought belongs to what the reply is read after; a batchmate without one is steered from its own start."""
    lm = tiny_model("llama")
    texts = ["<think>hm</think>Yes, W1.", "Yes, W1, if you please.", "<think>no</think>W1"]
    prompt = render_prompt(lm.tokenizer, LONG, "user")
    for reading, text in zip(read_all(Reader(lm), [(LONG, t) for t in texts], additions), texts, strict=True):
        thought = text.partition("</think>")[0] + "</think>" if "</think>" in text else ""
        ids, first = tokens_of(lm.tokenizer, prompt + text), len(tokens_of(lm.tokenizer, prompt + thought))
        assert_equal(reading, plain_forward(lm, ids, first, additions))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_prompt_of_one_token_leaves_nothing_to_keep(architecture: str) -> None:
    """The last prompt position is read with the reply, and there is no other."""
    bare = tiny_tokenizer("<|im_start|>{% for message in messages %}{{ message['content'] }}{% endfor %}")
    lm = prepare_model("bare", tiny_network(architecture), bare)
    assert tokens_of(lm.tokenizer, render_prompt(lm.tokenizer, (), "user")) == [1]
    texts = ["Where is it?", "No", "I have waited for two weeks now."]
    for additions in ({}, ADDITIONS):
        reader = Reader(lm)
        for _ in range(2):
            for reading, text in zip(read_all(reader, [((), t) for t in texts], additions), texts, strict=True):
                assert_equal(reading, plain_forward(lm, [1, *tokens_of(lm.tokenizer, text)], 1, additions))


def test_a_reply_without_any_prompt_is_refused() -> None:
    """Nothing predicts its first token."""
    lm = prepare_model(
        "empty",
        tiny_network("llama"),
        tiny_tokenizer("{% for message in messages %}{{ message['content'] }}{% endfor %}"),
    )
    with pytest.raises(ChatTemplateError, match="'No' cannot be found"):
        Reader(lm).read([((), "No")])
