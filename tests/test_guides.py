"""Guides in the engine: what a row may say, when its steering goes silent, how it ends; and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from continuous import MICRO_BATCHES, SLOTS, STRONG, alone, by_full_forwards, endless, running, tiny_lm
from reference import END, NEAR_TIE, Gate, Listener, blocks_of, greedy, hidden_in, prompt_of, push, run_together
from tiny import VOCABULARY, tiny_tokenizer
from torch import Tensor
from transformers import AddedToken

from traitbasis.engines.base import WRAP_UP_TOKENS, Failure, Guide, Request, Sampling, generate
from traitbasis.engines.sampling import Sampler, draw
from traitbasis.engines.text import TokenText
from traitbasis.errors import EngineError, RequestError
from traitbasis.model import LanguageModel

BOTH = ("llama", "gpt2", "mistral", "gemma2")


class Rule:
    """A guide by a rule: the token after n others is one of ``choices[n % len(choices)]``; None is any.

    silent_after, done_after: so many tokens (of the wrapping up too). wraps: how many tokens it goes on for when
    max_tokens is reached.
    """

    def __init__(
        self,
        *choices: Sequence[int] | None,
        silent_after: int = 10**6,
        done_after: int = 10**6,
        wraps: int = 0,
        size: int = VOCABULARY,
    ) -> None:
        self._choices = choices or (None,)
        self._size = size
        self._silent_after, self._done_after, self._wraps = silent_after, done_after, wraps
        self.taken: list[int] = []
        self.wrap_ups = 0

    @property
    def silent(self) -> bool:
        return len(self.taken) >= self._silent_after

    @property
    def done(self) -> bool:
        return len(self.taken) >= self._done_after

    def allowed(self) -> Tensor | None:
        choices = self._choices[len(self.taken) % len(self._choices)]
        if choices is None:
            return None
        allowed = torch.zeros(self._size, dtype=torch.bool)
        allowed[list(choices)] = True
        return allowed

    def take(self, token: int) -> None:
        self.taken.append(token)

    def wrap_up(self) -> bool:
        self.wrap_ups += 1
        self._done_after = len(self.taken) + self._wraps
        return self._wraps > 0


def ruled(*choices: Sequence[int] | None, **options: Any) -> Callable[[], Rule]:
    return lambda: Rule(*choices, **options)


EVEN, ODD, FEW = range(4, VOCABULARY, 2), range(3, VOCABULARY, 2), (20, 30, 40, 50, 60)


def by_rule(
    lm: LanguageModel, request: Request, n: int, choices: Sequence[Sequence[int] | None], silent_after: int = 10**6
) -> tuple[int, ...]:
    """Greedy tokens, each the likeliest of its choices by a full forward over everything so far. Positions that were
    read before `silent_after` tokens were drawn are shifted. Refuses a near tie."""
    prompt = request.prompt_ids
    first = 0 if request.positions == "all" else len(prompt) - 1
    last = len(prompt) - 1 + silent_after if silent_after else 0

    def hook_for(addition: Tensor) -> Callable[..., Any]:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            hidden = hidden_in(output).clone()
            hidden[:, first:last] += addition
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return hook

    tokens: list[int] = []
    blocks = blocks_of(lm.model)
    with ExitStack() as stack:
        for z, addition in request.additions.items():
            stack.callback(blocks[z].register_forward_hook(hook_for(addition)).remove)
        while len(tokens) < n:
            with torch.no_grad():
                logits = lm.model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1]
            choice = choices[len(tokens) % len(choices)]
            ids = list(range(len(logits)) if choice is None else choice)
            best = logits[ids].topk(min(2, len(ids))).values.tolist()
            assert len(best) < 2 or best[0] - best[1] > NEAR_TIE, "a near tie: choose another seed for this test"
            tokens.append(ids[int(logits[ids].argmax())])
    return tuple(tokens)


# --- what it may say ---


@pytest.mark.parametrize("architecture", BOTH)
def test_a_guided_row_says_the_likeliest_of_what_is_allowed(architecture: str) -> None:
    """Against full forwards; steered and not, beside each other and alone."""
    lm, choices = tiny_lm(architecture), (EVEN, None, FEW, ODD)
    requests = [
        endless(prompt_of(12 + 9 * i), 14, additions=push(1, STRONG) if i % 2 else {}, guide=ruled(*choices))
        for i in range(3)
    ]
    expected = [by_rule(lm, request, 14, choices) for request in requests]
    assert [alone(lm, request).token_ids for request in requests] == expected
    with running(lm) as engine:
        assert [generation.token_ids for generation in run_together(engine, requests)] == expected


@pytest.mark.parametrize("architecture", BOTH)
def test_a_guided_row_is_the_same_alone_and_in_a_crowd_and_leaves_the_others_alone(architecture: str) -> None:
    """Contracts 3 and 9: greedy and seeded rows, guided, going silent, done and wrapped up at different steps."""
    lm = tiny_lm(architecture)
    guides: list[Callable[[], Guide] | None] = [
        None,
        ruled(EVEN, silent_after=3),
        None,
        ruled(FEW, done_after=6),
        ruled(None, ODD, silent_after=1, wraps=4),
        None,
        ruled(None, silent_after=5),
    ]
    requests = []
    for i, guide in enumerate(guides * 2):
        sampling = Sampling(temperature=0 if i % 2 else 1.1, max_tokens=8 + i % 5, top_k=0 if i % 3 else 6)
        additions = push(i % 3, STRONG) if i % 4 else {}
        requests.append(Request(prompt_of(10 + 3 * i), i, sampling, frozenset({END}), additions, guide=guide))
    expected = [alone(lm, request) for request in requests]
    unguided = [alone(lm, replace(request, guide=None)) for request in requests]
    assert sum(found != plain for found, plain in zip(expected, unguided, strict=True)) >= 6
    with running(lm) as engine:
        assert run_together(engine, requests) == expected
        assert run_together(engine, requests[::-1]) == expected[::-1]
    with running(lm, max_batch=3) as engine:
        assert run_together(engine, requests) == expected


def test_the_guide_comes_after_penalties_and_bias_and_before_temperature_and_filters() -> None:
    """400 seeds: a bias cannot bring in what is not allowed, and filters count among what is allowed. Probabilities by
    definition, from the logits of a full forward."""
    lm, prompt = tiny_lm("llama"), prompt_of(14)
    with torch.no_grad():
        scores = lm.model(torch.tensor([prompt])).logits[0, -1].double()
    bias = {7: 100.0, 20: 2.0}
    shifted = scores.clone()
    shifted[20] += 2.0
    kept = sorted(FEW, key=lambda token: -float(shifted[token]))[:3]
    p = dict(zip(kept, (shifted[kept] / 2.0).softmax(-1).tolist(), strict=True))
    sampling = Sampling(temperature=2.0, top_k=3, max_tokens=1, logit_bias=bias)
    requests = [Request(prompt, seed, sampling, frozenset(), guide=ruled(FEW)) for seed in range(400)]
    with running(lm, max_batch=64, max_queue=1000) as engine:
        drawn = [generation.token_ids[0] for generation in run_together(engine, requests)]
    assert set(drawn) <= set(kept)
    for token in kept:
        assert drawn.count(token) == pytest.approx(400 * p[token], abs=5 * (400 * p[token] * (1 - p[token])) ** 0.5 + 2)


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 100.0, "temperature": 1e-5, "top_p": 1e-300},
        {"frequency_penalty": 100.0, "presence_penalty": 100.0, "temperature": 0.0},
        {"logit_bias": dict.fromkeys(FEW, -100.0), "min_p": 1.0},
        {"temperature": 100.0},
    ],
    ids=str,
)
def test_no_setting_brings_out_what_is_not_allowed(extreme: dict[str, Any]) -> None:
    lm, few = tiny_lm("llama"), FEW[:2]
    sampling = Sampling(**{"temperature": 1.0, "max_tokens": 20, **extreme})
    requests = [Request((*prompt_of(15), *FEW), seed, sampling, frozenset({END}), guide=ruled(few)) for seed in (1, 2)]
    with running(lm) as engine:
        for generation in run_together(engine, requests):
            assert set(generation.token_ids) <= set(few)
            assert generation.finish == "length"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_the_model_gives_no_chance_at_all_is_said_where_nothing_else_is_allowed(temperature: float) -> None:
    """Some models' logits of tokens that nobody uses are minus infinity."""
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 3] = 1.0
    sampling = Sampling(temperature=temperature, top_k=2)
    for allowed in ((5,), (5, 7), (3, 5)):
        sampler = Sampler(Request((1,), 0, sampling, frozenset()), Rule(allowed, size=10))
        (drawn,) = draw([sampler], logits)
        assert drawn is not None
        assert drawn[0] == 3 if 3 in allowed else drawn[0] in allowed


@pytest.mark.parametrize("size", [61, VOCABULARY - 13, VOCABULARY + 40])
def test_a_guide_may_know_another_number_of_tokens_than_the_model(size: int) -> None:
    """Tokenizers have fewer than padded embeddings, or more: what it does not know is not allowed."""
    lm = tiny_lm("llama")
    known = [token for token in EVEN if token < size]
    request = endless(prompt_of(12), 10, guide=ruled(EVEN if size > VOCABULARY else known, size=size))
    assert alone(lm, request).token_ids == by_rule(lm, request, 10, [known])


def test_log_probabilities_are_the_models_own_whatever_the_guide_allows() -> None:
    lm = tiny_lm("llama")
    plain = Request(prompt_of(12), 3, Sampling(temperature=1.0, max_tokens=1, logprobs=5), frozenset())
    guided = replace(plain, guide=ruled(FEW))
    with torch.no_grad():
        logs = lm.model(torch.tensor([plain.prompt_ids])).logits[0, -1].log_softmax(-1)
    free, found = alone(lm, plain), alone(lm, guided)
    assert found.token_ids[0] in FEW
    assert found.logprobs[0].top == free.logprobs[0].top
    assert found.logprobs[0].logprob == pytest.approx(float(logs[found.token_ids[0]]), abs=1e-4)


# --- how it ends ---


def test_a_reply_ends_where_the_guide_is_done() -> None:
    lm = tiny_lm("llama")
    for after in (1, 4):
        found = alone(lm, endless(prompt_of(12), 30, guide=ruled(EVEN, done_after=after)))
        assert (found.finish, len(found.token_ids)) == ("stop", after)
        assert found.text == lm.tokenizer.decode(found.token_ids, skip_special_tokens=True)


def test_a_stop_token_ends_a_reply_only_where_it_is_allowed_and_the_guide_is_not_told_of_it() -> None:
    lm, guides = tiny_lm("llama"), []

    def guide() -> Rule:
        guides.append(Rule(FEW, FEW, FEW, (END,)))
        return guides[-1]

    sampling = Sampling(temperature=0, max_tokens=30, logit_bias={END: 100.0})
    found = alone(lm, Request(prompt_of(12), 0, sampling, frozenset({END, 7}), guide=guide))
    assert (found.finish, found.token_ids[3:]) == ("stop", (END,))
    assert set(found.token_ids[:3]) <= set(FEW)
    assert guides[0].taken == list(found.token_ids[:3])


def test_a_stop_string_ends_a_guided_reply_too() -> None:
    lm = tiny_lm("llama")
    request = endless(prompt_of(12), 12, guide=ruled(FEW))
    free = alone(lm, request)
    stop = free.text[5]
    stopped = alone(lm, replace(request, sampling=replace(request.sampling, stop=(stop,))))
    assert (stopped.text, stopped.finish) == (free.text[: free.text.index(stop)], "stop")


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("wraps", [1, 5, WRAP_UP_TOKENS - 1, WRAP_UP_TOKENS])
def test_a_reply_that_has_used_its_tokens_may_be_wrapped_up(architecture: str, wraps: int) -> None:
    """Beyond max_tokens, and the finish says so; a batchmate of the same length is cut off."""
    lm, guides = tiny_lm(architecture), []

    def guide() -> Rule:
        guides.append(Rule(EVEN, wraps=wraps))
        return guides[-1]

    requests = [endless(prompt_of(12), 6, guide=guide), endless(prompt_of(12), 6)]
    with running(lm) as engine:
        found, mate = run_together(engine, requests)
    assert (found.finish, len(found.token_ids)) == ("length", 6 + wraps)
    assert (mate.finish, len(mate.token_ids)) == ("length", 6)
    assert guides[0].wrap_ups == 1 and guides[0].done
    assert found.text == lm.tokenizer.decode(found.token_ids, skip_special_tokens=True)


def test_wrapping_up_is_bounded_by_a_number_of_tokens_and_by_the_context() -> None:
    lm, request = tiny_lm("llama"), endless(prompt_of(12), 6, guide=ruled(EVEN, wraps=10**6))
    found = alone(lm, request)
    assert (found.finish, len(found.token_ids)) == ("length", 6 + WRAP_UP_TOKENS)
    for room in (1, 5, 6, 7, 20):
        with running(lm, max_context=12 + room) as engine:
            short = generate(engine, request)
        assert (short.finish, short.token_ids) == ("length", found.token_ids[:room])


def test_a_guide_that_is_done_or_declines_is_not_wrapped_up() -> None:
    lm, guides = tiny_lm("llama"), []

    def guide(done_after: int) -> Callable[[], Rule]:
        def make() -> Rule:
            guides.append(Rule(EVEN, done_after=done_after))
            return guides[-1]

        return make

    done = alone(lm, endless(prompt_of(12), 6, guide=guide(6)))
    assert (done.finish, len(done.token_ids), guides[0].wrap_ups) == ("stop", 6, 0)
    declined = alone(lm, endless(prompt_of(12), 6, guide=guide(7)))
    assert (declined.finish, len(declined.token_ids), guides[1].wrap_ups) == ("length", 6, 1)


def test_a_stop_token_in_the_wrapping_up_is_a_length_finish() -> None:
    lm = tiny_lm("llama")
    found = alone(lm, greedy(prompt_of(12), 3, guide=ruled(FEW, FEW, FEW, FEW, (END,), wraps=50)))
    assert (found.finish, len(found.token_ids)) == ("length", 5)


# --- silence (contract 10) ---


@pytest.mark.parametrize("architecture", [*SLOTS, *MICRO_BATCHES])
@pytest.mark.parametrize("positions", ["generated", "all"])
def test_steering_is_off_from_the_token_on_after_which_the_guide_is_silent(architecture: str, positions: Any) -> None:
    """Against full forwards in which only the positions up to there are shifted; beside a row that stays steered, and
    one that is not steered at all. Only tokens that were drawn under additions count as steered."""
    lm = tiny_lm(architecture)
    mates = [
        endless(prompt_of(9), 12, additions=push(2, STRONG), positions=positions),
        endless(prompt_of(10), 12, positions=positions),
    ]
    mates_say = [by_full_forwards(lm, mate) for mate in mates]
    ends = (0, 1, 2, 7, 12)
    requests = [
        endless(
            prompt_of(20 + 7 * i),
            12,
            additions={**push(1, STRONG), **push(2, -STRONG)},
            positions=positions,
            guide=ruled(None, silent_after=after),
        )
        for i, after in enumerate(ends)
    ]
    expected = [by_rule(lm, request, 12, [None], after) for request, after in zip(requests, ends, strict=True)]
    always = [by_rule(lm, request, 12, [None]) for request in requests]
    assert [a == b for a, b in zip(expected, always, strict=True)] == [False, False, False, False, True]
    with running(lm) as engine:
        found = run_together(engine, [mates[0], *requests, mates[1]])
        assert engine.stats().steered_tokens == 12 + sum(ends)
    assert [generation.token_ids for generation in found] == [mates_say[0], *expected, mates_say[1]]


def test_what_goes_silent_leaves_nothing_in_the_prefix_cache() -> None:
    """Contract 4: the next turn over the same prompt, and over what was said, is that of a cold engine."""
    lm = tiny_lm("llama")
    first = endless(prompt_of(70), 40, additions=push(1, STRONG), guide=ruled(None, silent_after=5))
    said = alone(lm, first).token_ids
    nexts = [
        endless(prompt, 6, additions=push(2, -STRONG)) for prompt in (first.prompt_ids, (*first.prompt_ids, *said))
    ]
    expected = [by_full_forwards(lm, request) for request in nexts]
    with running(lm) as engine:
        generate(engine, first)
        assert [generate(engine, request).token_ids for request in nexts] == expected
        assert engine.stats().cached_tokens == 2 * 64


# --- guides that fail, and rows that are cancelled ---


class Failing(Rule):
    """Raises in one of its methods from the third token on; `silent` and the constructor at once."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(EVEN, wraps=3)
        self._where, self._error = where, error
        if where == "__init__":
            raise error

    def __getattribute__(self, name: str) -> Any:
        if name in ("allowed", "take", "done", "wrap_up", "silent") and name == self._where:
            late = name == "wrap_up" or len(self.taken) >= (3 if name == "done" else 2)
            if name == "silent" or late:
                raise self._error
        return super().__getattribute__(name)


ERRORS = (RuntimeError("a bug"), RequestError("cannot be"), EngineError("broken"), KeyError("x"))


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("where", ["allowed", "take", "done", "wrap_up"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_guide_that_raises_fails_its_own_request_and_no_other(
    architecture: str, where: str, error: Exception
) -> None:
    lm = tiny_lm(architecture)
    mates = [endless(prompt_of(9), 12, additions=push(1, STRONG)), endless(prompt_of(30), 12, guide=ruled(ODD))]
    expected = [alone(lm, mate) for mate in mates]
    with running(lm, max_batch=3) as engine:
        heir = Listener()

        def bequeath(count: int) -> None:
            if isinstance(failed.events[-1], Failure):
                engine.submit(mates[0], heir)

        failed, listeners = Listener(bequeath), [Listener(), Listener()]
        bad = endless(prompt_of(15), 5, additions=push(2, STRONG), guide=lambda: Failing(where, error))
        with Gate(engine):
            for request, listener in zip((mates[0], bad, mates[1]), (listeners[0], failed, listeners[1]), strict=True):
                engine.submit(request, listener)
        assert [listener.generation() for listener in listeners] == expected
        assert heir.generation() == expected[0]
    *before, last = failed.wait()
    assert len(before) == (4 if where == "wrap_up" else 2)
    assert isinstance(last, Failure)
    if isinstance(error, RequestError | EngineError):
        assert last.error is error
    else:
        assert isinstance(last.error, EngineError) and last.error.__cause__ is error
        assert "guide" in str(last.error) and type(error).__name__ in str(last.error)


@pytest.mark.parametrize("where", ["__init__", "silent"])
def test_a_guide_that_cannot_be_made_is_an_error_of_submit(where: str) -> None:
    lm = tiny_lm("llama")
    with running(lm) as engine:
        for error in ERRORS:
            request = endless(prompt_of(9), 5, additions=push(1, 1.0), guide=lambda error=error: Failing(where, error))
            with pytest.raises(type(error) if isinstance(error, RequestError) else EngineError):
                engine.submit(request, Listener())
        assert generate(engine, endless(prompt_of(9), 5)).finish == "length"


@pytest.mark.parametrize("size", [0, VOCABULARY])
def test_a_guide_that_allows_nothing_fails_its_own_request(size: int) -> None:
    lm = tiny_lm("llama")
    mate = endless(prompt_of(9), 12)
    expected = alone(lm, mate)
    with running(lm) as engine:
        failed, listener = Listener(), Listener()
        with Gate(engine):
            engine.submit(endless(prompt_of(9), 12, guide=ruled((), size=size)), failed)
            engine.submit(mate, listener)
        assert listener.generation() == expected
    (failure,) = failed.wait()
    assert isinstance(failure, Failure) and "allows no token" in str(failure.error)


def test_a_row_that_is_not_finite_fails_as_such_with_a_guide_too() -> None:
    lm = tiny_lm("llama")
    bad = endless(prompt_of(9), 5, additions={1: torch.full((32,), torch.inf)}, guide=ruled(EVEN))
    with running(lm) as engine, pytest.raises(EngineError, match="not finite"):
        generate(engine, bad)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_cancelled_guided_row_ends_at_once_and_leaves_the_others_alone(architecture: str) -> None:
    """Its guide is not asked any more, not even to wrap up."""
    lm, guides = tiny_lm(architecture), []

    def guide() -> Rule:
        guides.append(Rule(EVEN, silent_after=2, wraps=9))
        return guides[-1]

    mates = [endless(prompt_of(9), 12, additions=push(1, STRONG)), endless(prompt_of(30), 12, guide=ruled(ODD))]
    expected = [alone(lm, mate) for mate in mates]
    with running(lm) as engine:
        gone = Listener(lambda count: ticket.cancel() if count == 4 else None)
        listeners = [Listener(), Listener()]
        with Gate(engine):
            ticket = engine.submit(endless(prompt_of(15), 4 + 1, additions=push(2, STRONG), guide=guide), gone)
            for mate, listener in zip(mates, listeners, strict=True):
                engine.submit(mate, listener)
        assert [listener.generation() for listener in listeners] == expected
        found = gone.generation()
    assert (found.finish, len(found.token_ids)) == ("cancelled", 4)
    assert (guides[0].taken, guides[0].wrap_ups) == (list(found.token_ids), 0)


# --- requests ---


def test_each_generation_of_a_request_has_a_guide_of_its_own() -> None:
    lm = tiny_lm("llama")
    request = endless(prompt_of(12), 8, guide=ruled(EVEN, FEW, done_after=5))
    with running(lm) as engine:
        assert len({*map(str, run_together(engine, [request] * 4))}) == 1
        assert generate(engine, request).finish == "stop"


@pytest.mark.parametrize(
    ("field", "value"),
    [("guide", 5), ("guide", Rule()), ("shown_ids", [3]), ("shown_ids", 3)],
    ids=["a number", "not made yet", "a list", "one id"],
)
def test_fields_that_are_nothing_of_the_kind_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        Request(prompt_of(3), 0, Sampling(), frozenset(), **{field: value})


# --- special tokens that are part of the text ---


@pytest.fixture
def texts() -> Iterator[tuple[Any, list[int]]]:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<call>", special=True), AddedToken("</call>", special=True)], special_tokens=True)
    tokenizer.add_tokens([AddedToken("<note>", special=False)])
    yield tokenizer, tokenizer("hé<call>{}</call><note><|im_end|>x")["input_ids"]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ([], "hé{}<note>x"),
        (["<call>"], "hé<call>{}<note>x"),
        (["<call>", "</call>"], "hé<call>{}</call><note>x"),
        (["<|im_end|>", "<note>"], "hé{}<note><|im_end|>x"),
    ],
)
def test_special_tokens_leave_text_where_they_are_to_be_shown(
    texts: tuple[Any, list[int]], shown: list[str], text: str
) -> None:
    """Piece by piece, with stop strings looked for in what is shown."""
    tokenizer, ids = texts
    shown_ids = tokenizer.convert_tokens_to_ids(shown)
    growing = TokenText(tokenizer, (), shown_ids)
    pieces = [growing.push(token)[0] for token in ids]
    assert "".join(pieces) + growing.flush() == text
    assert all("\ufffd" not in piece for piece in pieces)
    stopping = TokenText(tokenizer, ("l>{",), shown_ids)
    found = []
    for token in ids:
        piece, stopped = stopping.push(token)
        found.append(piece)
        if stopped:
            break
    assert "".join(found) + ("" if stopped else stopping.flush()) == text.partition("l>{")[0]


def test_the_engine_shows_what_a_request_says() -> None:
    lm = tiny_lm("llama")
    rule = ruled((1,), (20,), (END,), (30,), done_after=4)
    hidden = alone(lm, endless(prompt_of(9), 9, guide=rule))
    shown = alone(lm, endless(prompt_of(9), 9, guide=rule, shown_ids=frozenset({1})))
    decode = lm.tokenizer.decode
    assert hidden.token_ids == shown.token_ids == (1, 20, END, 30)
    assert hidden.text == decode([20, 30])
    assert shown.text == "<|im_start|>" + decode([20, 30])
