"""Text of a growing token sequence: complete characters only, and never a part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Listener, greedy, prompt_of
from tiny import tiny_model, tiny_tokenizer

from traitbasis.engines.base import Request, Sampling, generate
from traitbasis.engines.text import TokenText
from traitbasis.engines.transformers import TransformersEngine

TOKENIZER = tiny_tokenizer()
# U+FFFD stands for an incomplete character while text grows, so a stop string cannot be told from one.
ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
FEW = st.sampled_from("ab\né€😀")


@st.composite
def text_and_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Arbitrary text with stop strings taken from it, or a crowd of overlapping ones over a few characters."""
    if draw(st.booleans()):
        return draw(st.text(FEW, max_size=24)), draw(st.lists(st.text(FEW, min_size=1, max_size=4), max_size=5))
    text = draw(st.text(ANY, min_size=1, max_size=24))
    starts = draw(st.lists(st.integers(0, len(text) - 1), max_size=3))
    inside = [text[start : start + draw(st.integers(1, 5))] for start in starts]
    return text, [*inside, *draw(st.lists(st.text(ANY, min_size=1, max_size=4), max_size=3))]


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """`text` before the stop string that is complete first (of those complete at once, the longest)."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def byte_ids(data: bytes) -> list[int]:
    """Ids of bytes in the tiny tokenizer, by GPT-2's table: printable bytes are themselves, the others follow."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    order = sorted(character.values())
    return [3 + order.index(character[byte]) for byte in data]


def push_all(ids: list[int], stops: list[str]) -> tuple[list[str], bool]:
    text, pieces = TokenText(TOKENIZER, stops), []
    for token in ids:
        piece, stopped = text.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, text.flush()], False


@settings(max_examples=300, deadline=None)
@given(text_and_stops())
def test_joined_pieces_are_the_text_before_the_first_stop_string(case: tuple[str, list[str]]) -> None:
    """One token a byte, so stop strings and characters cross every border there is."""
    text, stops = case
    pieces, stopped = push_all(byte_ids(text.encode()), stops)
    assert ("".join(pieces), stopped) == cut(text, stops)


@settings(max_examples=200, deadline=None)
@given(text_and_stops())
def test_only_what_may_become_a_stop_string_is_held_back(case: tuple[str, list[str]]) -> None:
    """Streaming: after each complete character, the text not yet sent is the beginning of some stop string."""
    text, stops = case
    growing, sent, data = TokenText(TOKENIZER, stops), "", text.encode()
    for count, token in enumerate(byte_ids(data), start=1):
        piece, stopped = growing.push(token)
        sent += piece
        if stopped:
            break
        complete = data[:count].decode(errors="ignore")
        assert complete.startswith(sent)
        held = complete[len(sent) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.lists(st.text(FEW, min_size=1, max_size=3), max_size=3))
def test_bytes_that_are_no_text_come_out_as_replacement_characters(data: bytes, stops: list[str]) -> None:
    """A random model writes such bytes; each piece is final all the same."""
    pieces, stopped = push_all(byte_ids(data), stops)
    assert ("".join(pieces), stopped) == cut(data.decode(errors="replace"), stops)


def test_special_tokens_leave_no_text_and_do_not_hide_a_stop_string() -> None:
    ids = [*byte_ids(b"one #"), 1, *byte_ids(b"## two")]
    assert push_all(ids, ["###"]) == (["o", "n", "e", " ", "", "", "", ""], True)


def test_a_begun_stop_string_is_sent_when_the_generation_ends() -> None:
    assert push_all(byte_ids(b"wait ##"), ["###STOP###"])[0] == [*"wait ", "", "", "##"]


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine(tiny_model("gemma2"))


def test_the_engine_ends_at_a_stop_string(engine: TransformersEngine) -> None:
    """The events' text is the free-running text before the stop string; the token that completed it is the last."""
    free = generate(engine, greedy(prompt_of(12), 40))
    stop = free.text[6:9]
    end = next(n for n in range(1, 41) if stop in TOKENIZER.decode(free.token_ids[:n], skip_special_tokens=True))
    sampling = Sampling(temperature=0, max_tokens=40, stop=("never there", stop))
    listener = Listener()
    engine.submit(Request(prompt_of(12), 0, sampling, frozenset()), listener)
    assert listener.generation().text == free.text[: free.text.index(stop)]
    assert listener.generation().token_ids == free.token_ids[:end]
    assert listener.generation().finish == "stop"
    assert len(listener.events) == end
