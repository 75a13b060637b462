"""The user simulator on scripted texts: guards, tries, streams, errors (contract 8, fault 24)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sample_set
from scripted import Script, ScriptedEngine
from tiny import tiny_model

from traitbasis.basis import Basis, build_basis
from traitbasis.engines.base import EngineStats, Failure, Sampling
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import EngineBusyError, EngineError, RequestError
from traitbasis.extract import extract
from traitbasis.guards import GUARDS, Conversation, Guard
from traitbasis.model import LanguageModel
from traitbasis.simulator import UserSimulator
from traitbasis.tries import MAX_TRIES, SILENCE, UserTurn
from traitbasis.users import ServedUser

TALK = [{"role": "system", "content": "You want a refund."}, {"role": "user", "content": "How can I help?"}]
SHORT = Guard("short", lambda text, _: len(text) < 9)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def basis(lm: LanguageModel) -> Basis:
    return build_basis([extract(lm, sample_set(trait=trait)) for trait in ("impatience", "confusion")])


Scripted = Callable[..., Any]


@pytest.fixture(params=["threaded", "within submit"])
def scripted(lm: LanguageModel, basis: Basis, request: pytest.FixtureRequest) -> Iterator[Scripted]:
    """Makes a simulator on scripted texts, and its engine."""
    engines = []

    def make(*scripts: Any, **options: Any) -> tuple[UserSimulator, ScriptedEngine]:
        engines.append(ScriptedEngine(*scripts, threaded=request.param == "threaded"))
        return UserSimulator(lm, basis, engine=engines[-1], **options), engines[-1]

    yield make
    for engine in engines:
        engine.close()


def in_time(act: Callable[[], Any], seconds: float = 10) -> Any:
    """The result of `act`, run in a thread so that a reply that never comes fails the test."""
    results: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            results.put(act())
        except BaseException as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    result = results.get(timeout=seconds)
    if isinstance(result, BaseException):
        raise result
    return result


@contextmanager
def live(lm: LanguageModel, basis: Basis, *scripts: Any, **options: Any) -> Iterator[UserSimulator]:
    with UserSimulator(lm, basis, engine=ScriptedEngine(*scripts), **options) as user:
        yield user


# --- guards -----------------------------------------------------------------------------------------------------------


def test_a_good_turn_is_passed_on_as_it_is(scripted: Scripted) -> None:
    user, engine = scripted(Script([" Where ", "is it?\n"]))
    turn = user.reply(TALK, seed=3)
    assert (turn.text, turn.finish, turn.tries, turn.rejected, turn.failed_guard) == (
        "Where is it?",
        "stop",
        1,
        {},
        None,
    )
    assert turn.completion_tokens == 2 and turn.prompt_tokens == len(engine.requests[0].prompt_ids)
    assert str(turn) == "Where is it?" and turn.seed == 3 and len(engine.requests) == 1


def test_a_rejected_turn_is_generated_again_and_counted(scripted: Scripted) -> None:
    user, engine = scripted(" \n", "<think>hm</think>Fine.", "Where is it?")
    turn = user.reply(TALK)
    assert (turn.text, turn.tries, turn.failed_guard) == ("Where is it?", 3, None)
    assert turn.rejected == {"empty": 1, "thought": 1}
    assert len(engine.requests) == 3


def test_tries_are_bounded_and_the_best_candidate_is_marked(scripted: Scripted) -> None:
    """Contract 8. A sendable candidate is better than none, and guards never edit it."""
    user, engine = scripted("", "much too long", "<think>no", "also too long", guards=(*GUARDS, SHORT))
    turn = user.reply(TALK)
    assert len(engine.requests) == turn.tries == MAX_TRIES
    assert (turn.text, turn.failed_guard) == ("much too long", "short")
    assert turn.rejected == {"empty": 1, "short": 2, "thought": 1}


@pytest.mark.parametrize("text", ["", " \n\t", "<think>hm", "hm</think>yes"])
def test_the_text_is_never_empty_and_never_a_thought(text: str, scripted: Scripted) -> None:
    """Contract 8, fault 24: when nothing may be sent, a user who says nothing."""
    user, engine = scripted(text)
    turn = user.reply(TALK)
    assert turn.text == SILENCE and turn.text.strip()
    assert turn.failed_guard in ("empty", "thought") and turn.rejected == {turn.failed_guard: MAX_TRIES}
    assert len(engine.requests) == MAX_TRIES
    assert "".join(user.stream(TALK)) == SILENCE


THOUGHTS = {
    "open only": ["<think>", "SECRET plan"],
    "close only": ["SECRET plan", "</think>", "Where is it?"],
    "whole": ["<think>SECRET</think>", "Where is it?"],
    "cut off": ["Well. <think", ">SECRET pl"],
    "split over chunks": ["<thi", "nk>SEC", "RET</th", "ink>", "Where is it?"],
    "another spelling": ["<Thinking>", "SECRET", "</Thinking>", "ok"],
    "space inside": ["<think >SECRET", "</think >", "ok"],
}


@pytest.mark.parametrize("kind", THOUGHTS)
@pytest.mark.parametrize("tries", [1, MAX_TRIES])
def test_thought_text_never_reaches_the_caller_nor_its_stream(kind: str, tries: int, scripted: Scripted) -> None:
    """Fault 24."""
    thought = Script(THOUGHTS[kind], "length" if kind == "cut off" else "stop")
    user, _ = scripted(*[thought] * tries, "Where is it?")
    told: SimpleQueue[Any] = SimpleQueue()
    user.submit(user.prepare(TALK), told.put)
    items = [told.get(timeout=10)]
    while not isinstance(items[-1], UserTurn):
        items.append(told.get(timeout=10))
    *pieces, turn = items
    assert "SECRET" not in "".join(pieces) + turn.text and "think" not in "".join(pieces).lower()
    assert turn.text == (SILENCE if tries == MAX_TRIES else "Where is it?")
    assert turn.rejected == {"thought": tries}


def test_a_cancelled_thought_does_not_leak_either(lm: LanguageModel, basis: Basis) -> None:
    with live(lm, basis, Script(["<think>SECRET"], waits=True)) as user:
        told: SimpleQueue[Any] = SimpleQueue()
        user.submit(user.prepare(TALK), told.put).cancel()
        items = [told.get(timeout=10)]
        while not isinstance(items[-1], UserTurn):
            items.append(told.get(timeout=10))
    assert items[-1].finish == "cancelled" and items[-1].rejected == {}
    assert "SECRET" not in "".join(str(item) for item in items)


def test_a_retry_does_not_repeat_the_draw_even_when_greedy(scripted: Scripted) -> None:
    user, engine = scripted("")
    user.reply(TALK, seed=5, temperature=0)
    first, *again = engine.requests
    assert first.sampling.temperature == 0
    assert len({request.seed for request in engine.requests}) == MAX_TRIES
    assert all(request.sampling.temperature > 0 for request in again)
    assert all(request.prompt_ids == first.prompt_ids and request.additions is first.additions for request in again)
    user.reply(TALK, seed=5, temperature=1.3)
    assert {request.sampling.temperature for request in engine.requests[MAX_TRIES:]} == {1.3}
    assert [r.seed for r in engine.requests[MAX_TRIES:]] == [r.seed for r in engine.requests[:MAX_TRIES]], "contract 9"


def test_the_least_harmful_candidate_goes_out(scripted: Scripted) -> None:
    """Guards stand in the order of harm: of two that may be sent, the one that fails the later guard."""
    worse = Guard("worse", lambda text, _: "bad" not in text)
    user, _ = scripted("bad", "long and bad", "much too long", "bad", guards=(worse, SHORT))
    turn = user.reply(TALK)
    assert (turn.text, turn.failed_guard, turn.rejected) == ("much too long", "short", {"worse": 3, "short": 1})


def test_a_last_resort_replaces_the_text_and_silence_an_empty_one(scripted: Scripted) -> None:
    cut = Guard("cut", lambda text, _: "X" not in text, last_resort=lambda text, _: text.replace("X", ""))
    user, _ = scripted("Bye X", guards=(cut,))
    assert (user.reply(TALK).text, user.reply(TALK).failed_guard) == ("Bye", "cut")
    user, _ = scripted("X", "X", "X", "Bye X", guards=(cut,))
    assert user.reply(TALK).text == "Bye", "text that is left is better than none"
    user, _ = scripted("X", guards=(cut,))
    assert user.reply(TALK).text == SILENCE


def test_guards_see_the_conversation_whatever_was_left_out_of_the_prompt(lm: LanguageModel, basis: Basis) -> None:
    seen: list[Conversation] = []

    def look(text: str, conversation: Conversation) -> bool:
        seen.append(conversation)
        return True

    class Small(ScriptedEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), max_context=200)

    long = [TALK[0], {"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b"}, TALK[1]]
    with UserSimulator(lm, basis, engine=Small("x"), guards=[Guard("look", look)]) as user:
        turn = user.reply(long)
    assert turn.dropped == {"agent": 1} and len(user.engine.requests[0].prompt_ids) < 200  # type: ignore[attr-defined]
    assert [t.text for t in seen[0].turns] == [m["content"] for m in long]


def test_a_served_users_switches_choose_its_guards(scripted: Scripted) -> None:
    user, _ = scripted("x", guards=(*GUARDS, SHORT))
    names = [guard.name for guard in user.guards_of(ServedUser(name="a", guards={"empty": False, "thought": True}))]
    assert names == [guard.name for guard in (*GUARDS, SHORT) if guard.name != "empty"]
    user, _ = scripted("x", guards=())
    assert [guard.name for guard in user.guards_of(ServedUser(name="a", guards={"thought": True}))] == ["thought"]


# --- tools ------------------------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": {}}, "required": ["x"]}}},
    {"type": "function", "function": {"name": "wait"}},
]


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_call_is_a_turn_without_text_and_its_id_follows_from_the_seed(scripted: Scripted) -> None:
    user, _ = scripted(called("look", x=1))
    turn, again, other = (user.reply(TALK, tools=TOOLS, seed=seed) for seed in (1, 1, 2))
    assert turn.text == "" and [(c.name, c.arguments) for c in turn.calls] == [("look", {"x": 1})]
    assert turn.failed_guard is None and turn.rejected == {} and turn.as_ == "user"
    assert turn.calls == again.calls and turn.calls[0].id != other.calls[0].id


def test_text_beside_tools_is_judged_as_ever(scripted: Scripted) -> None:
    user, _ = scripted("", "Where is it?")
    turn = user.reply(TALK, tools=TOOLS)
    assert (turn.text, turn.calls, turn.rejected) == ("Where is it?", (), {"empty": 1})


@pytest.mark.parametrize(
    ("bad", "guard"),
    [
        ("Let me see. " + called("look", x=1), "mixed_call"),
        (called("look", x=1) + " There.", "mixed_call"),
        ("<tool_call>{broken", "tool_call"),
        (called("fly"), "tool_call"),
        (called("look"), "tool_call"),
    ],
)
def test_a_turn_that_is_no_good_call_is_drawn_again(bad: str, guard: str, scripted: Scripted) -> None:
    user, _ = scripted(bad, called("wait"))
    turn = user.reply(TALK, tools=TOOLS)
    assert turn.rejected == {guard: 1} and [call.name for call in turn.calls] == ["wait"]


def test_when_tries_run_out_a_mixed_turn_is_its_call_and_a_broken_one_silence(scripted: Scripted) -> None:
    """1.3: text and a call in one turn is a USER_ERROR; arguments that are no JSON crash the simulation."""
    user, _ = scripted("Let me see. " + called("look", x=1))
    turn = user.reply(TALK, tools=TOOLS)
    assert (turn.text, [c.name for c in turn.calls], turn.failed_guard) == ("", ["look"], "mixed_call")
    user, _ = scripted("<tool_call>{broken")
    turn = user.reply(TALK, tools=TOOLS)
    assert (turn.text, turn.calls, turn.failed_guard) == (SILENCE, (), "tool_call")


def test_a_call_is_not_repeated_before_the_agent_has_spoken(scripted: Scripted) -> None:
    """Fault 26: such a user repeats its call until the harness gives up."""
    wire = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    rounds = [{"role": "assistant", "tool_calls": [wire]}, {"role": "tool", "tool_call_id": "c1", "content": "dark"}]
    user, _ = scripted(called("look", x=1), called("look", x=2))
    turn = user.reply([*TALK, *rounds], tools=TOOLS)
    assert turn.rejected == {"repeat": 1} and turn.calls[0].arguments == {"x": 2}
    user, _ = scripted(called("look", x=1))
    assert user.reply([*TALK, *rounds], tools=TOOLS).text == SILENCE
    demanded = user.reply([*TALK, *rounds], tools=TOOLS, tool_choice="required")
    assert demanded.calls[0].arguments == {"x": 1} and demanded.failed_guard == "repeat"
    off = ServedUser(name="a", guards={"repeat": False})
    assert user.reply([*TALK, *rounds], tools=TOOLS, user=off).failed_guard is None
    wait = {"id": "c2", "type": "function", "function": {"name": "wait", "arguments": "{}"}}
    between = [{"role": "assistant", "tool_calls": [wait]}, {"role": "tool", "tool_call_id": "c2", "content": "ok"}]
    assert user.reply([*TALK, *rounds, *between], tools=TOOLS).failed_guard is None, "looks again after another call"
    later = [*TALK, *rounds, {"role": "assistant", "content": "It is dark."}, {"role": "user", "content": "Again!"}]
    user, _ = scripted(called("look", x=1))
    assert user.reply(later, tools=TOOLS).calls[0].arguments == {"x": 1}


def test_a_call_that_is_demanded_and_never_ends_is_an_error(scripted: Scripted) -> None:
    user, _ = scripted("<tool_call>{broken")
    with pytest.raises(RequestError, match="max_tokens"):
        in_time(lambda: user.reply(TALK, tools=TOOLS, tool_choice="required"))


def test_tools_without_guards_are_not_streamed_as_text(scripted: Scripted) -> None:
    user, _ = scripted(called("wait"), guards=())
    assert list(user.stream(TALK, tools=TOOLS)) == []


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guards", [(), GUARDS])
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.text(alphabet="ab.\n \u00a0é😀", max_size=4), max_size=8))
def test_streamed_pieces_joined_are_the_turn(lm: LanguageModel, basis: Basis, guards: Any, pieces: list[str]) -> None:
    user = UserSimulator(lm, basis, engine=ScriptedEngine(Script(pieces), threaded=False), guards=guards)
    told: list[Any] = []
    user.submit(user.prepare(TALK), told.append)
    *streamed, turn = told
    assert "".join(streamed) == turn.text == ("".join(pieces).strip() or SILENCE), "guards or not: never empty"
    assert all(streamed), "no empty piece"
    assert "".join(user.stream(TALK)) == turn.text


def test_without_guards_text_is_passed_on_while_it_is_generated(lm: LanguageModel, basis: Basis) -> None:
    with live(lm, basis, Script([" Where", " is", " it "], waits=True), guards=()) as user:
        stream = user.stream(TALK)
        assert [next(stream) for _ in range(3)] == ["Where", " is", " it"]
        stream.close()  # type: ignore[attr-defined]
        assert user.engine.tickets[0].cancelled.is_set()  # type: ignore[attr-defined]


def test_with_guards_nothing_is_passed_on_before_the_turn_has_passed(lm: LanguageModel, basis: Basis) -> None:
    with live(lm, basis, Script(["Where", " is"], waits=True)) as user:
        told: SimpleQueue[Any] = SimpleQueue()
        ticket = user.submit(user.prepare(TALK), told.put)
        with pytest.raises(Exception):  # noqa: B017 - queue.Empty
            told.get(timeout=0.1)
        ticket.cancel()
        assert [told.get(timeout=10) for _ in range(2)] == ["Where", " is"]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_cancelling_ends_the_turn_without_another_try(lm: LanguageModel, basis: Basis) -> None:
    with live(lm, basis, "", "", Script([], waits=True)) as user:
        told: SimpleQueue[Any] = SimpleQueue()
        ticket = user.submit(user.prepare(TALK), told.put)
        while len(user.engine.tickets) < 3:  # type: ignore[attr-defined]
            threading.Event().wait(0.005)
        ticket.cancel()
        items = [told.get(timeout=10)]
        while not isinstance(items[-1], UserTurn):
            items.append(told.get(timeout=10))
        assert items[-1].finish == "cancelled" and len(user.engine.requests) == 3  # type: ignore[attr-defined]


def test_a_try_that_is_queued_while_the_caller_cancels_is_cancelled_too(lm: LanguageModel, basis: Basis) -> None:
    class Cancelling(ScriptedEngine):
        def submit(self, request: Any, listener: Any, **options: Any) -> Any:
            if len(self.requests) == 1:
                ticket.cancel()
            return super().submit(request, listener, **options)

    gate = threading.Event()

    def passes(text: str, conversation: Conversation) -> bool:
        assert gate.wait(10)
        return text != "again"

    engine = Cancelling("again", Script(["never"], waits=True))
    with UserSimulator(lm, basis, engine=engine, guards=[Guard("gate", passes)]) as user:
        told: SimpleQueue[Any] = SimpleQueue()
        ticket = user.submit(user.prepare(TALK), told.put)
        gate.set()
        while not isinstance(item := told.get(timeout=10), UserTurn):
            pass
        assert item.finish == "cancelled"


@pytest.mark.parametrize("rejected", ["much too long", ""])
def test_a_full_queue_at_a_retry_is_reported_and_changes_no_text(rejected: str, scripted: Scripted) -> None:
    """Contract 9: the same request must not get another reply because the server was busy."""
    user, _ = scripted(rejected, EngineBusyError("full"), guards=(*GUARDS, SHORT))
    with pytest.raises(EngineBusyError, match="full"):
        in_time(lambda: user.reply(TALK))


def test_a_loop_is_drawn_again_and_the_sampling_that_drew_the_text_is_reported(scripted: Scripted) -> None:
    """Contract 11: a greedy draw that loops would loop again, so the next one has a temperature."""
    user, _ = scripted("I'm sorry. I'm sorry. I'm sorry.", "Where is it?")
    turn = in_time(lambda: user.reply(TALK, temperature=0, positions="all"))
    assert (turn.text, turn.rejected, turn.tries) == ("Where is it?", {"broken": 1}, 2)
    assert turn.sampling.temperature > 0 and turn.positions == "all"


def test_a_turn_that_was_let_in_is_not_turned_away_at_a_retry(lm: LanguageModel, basis: Basis) -> None:
    """Its next draw goes before those who wait, however full the queue is."""
    engine = TransformersEngine(lm, max_batch=1, max_queue=2)
    tries: list[str] = []

    def passes(text: str, _: Conversation) -> bool:
        tries.append(text)
        return len(tries) % 3 == 0

    third = Guard("third", passes)
    with UserSimulator(lm, basis, engine=engine, guards=[third], sampling=Sampling(max_tokens=4)) as user:
        told: SimpleQueue[Any] = SimpleQueue()
        refused = 0
        for seed in range(12):
            try:
                user.submit(user.prepare(TALK, seed=seed), told.put)
            except EngineBusyError:
                refused += 1
        turns: list[Any] = []
        while len(turns) < 12 - refused:
            item = told.get(timeout=10)
            assert not isinstance(item, Failure), item
            if isinstance(item, UserTurn):
                turns.append(item)
    assert refused and len(turns) >= 3 and all(turn.failed_guard is None for turn in turns)


def test_what_is_sent_instead_of_a_text_does_not_show_its_tokens(scripted: Scripted) -> None:
    user, _ = scripted("<think>SECRET")
    turn = user.reply(TALK, logprobs=0)
    assert turn.text == SILENCE and turn.token_ids == turn.logprobs == ()


def test_a_full_queue_at_first_is_the_callers_to_know(scripted: Scripted) -> None:
    user, _ = scripted(EngineBusyError("full"))
    with pytest.raises(EngineBusyError, match="full"):
        in_time(lambda: user.reply(TALK))


@pytest.mark.parametrize("scripts", [[Script(["Whe"], fails=EngineError("lost"))], ["", EngineError("lost")]])
def test_an_engine_that_fails_is_reported_and_nobody_waits(scripts: list[Any], scripted: Scripted) -> None:
    user, _ = scripted(*scripts)
    with pytest.raises(EngineError, match="lost"):
        in_time(lambda: user.reply(TALK))


def test_a_guards_own_mistake_is_reported_and_nobody_waits(scripted: Scripted) -> None:
    user, _ = scripted("text", guards=[Guard("broken", lambda text, _: text[99] == "x")])
    with pytest.raises(EngineError, match="IndexError") as caught:
        in_time(lambda: user.reply(TALK))
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_failure_comes_last_and_once(scripted: Scripted) -> None:
    user, _ = scripted(Script(["a"], fails=EngineError("lost")))
    told: SimpleQueue[Any] = SimpleQueue()
    user.submit(user.prepare(TALK), told.put)
    assert isinstance(told.get(timeout=10), Failure) and told.empty()


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_an_unknown_sampling_field_names_the_known_ones(scripted: Scripted) -> None:
    user, engine = scripted("x")
    for act in (user.reply, user.prepare, lambda *a, **k: list(user.stream(*a, **k))):
        with pytest.raises(RequestError, match=r"'temprature'; known: temperature, top_p, top_k, .*, stop, logprobs"):
            act(TALK, temprature=1)
    assert not engine.requests


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": "9"},
        {"stop": ("",)},
        {"stop": "word"},
        {"stop": (1,)},
        {"stop": None},
        {"seed": 1.5},
        {"seed": "7"},
    ],
)
def test_a_bad_value_is_a_request_error_naming_the_field(bad: dict[str, Any], scripted: Scripted) -> None:
    user, engine = scripted("x")
    with pytest.raises(RequestError, match=next(iter(bad))):
        user.reply(TALK, **bad)
    assert not engine.requests


def test_sampling_fields_change_the_simulators_own_defaults(scripted: Scripted) -> None:
    user, engine = scripted("x", sampling=Sampling(top_k=5, max_tokens=7))
    turn = user.reply(TALK, temperature=0.1, stop=("\n",))
    assert turn.sampling == engine.requests[0].sampling == Sampling(0.1, top_k=5, max_tokens=7, stop=("\n",))


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**80])
def test_any_whole_number_is_a_seed(seed: int, scripted: Scripted) -> None:
    user, engine = scripted("x")
    user.reply(TALK, seed=seed)
    assert 0 <= engine.requests[0].seed < 2**63


def test_the_default_instruction_stands_in_only_for_a_missing_system_message(
    scripted: Scripted, lm: LanguageModel
) -> None:
    user, _ = scripted("x")

    def prompt(messages: list[dict[str, str]]) -> str:
        return str(lm.tokenizer.decode(user.prepare(messages).request.prompt_ids))

    default = "You are a customer talking to a support agent"
    assert prompt(TALK).startswith("<|im_start|>system\nYou want a refund.<|im_end|>") and default not in prompt(TALK)
    for messages in ([], TALK[1:], [{"role": "system", "content": " "}, *TALK[1:]]):
        assert prompt(messages).startswith(f"<|im_start|>system\n{default}") and prompt(messages).count(default) == 1
