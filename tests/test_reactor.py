"""Customers that react: the fold over a conversation, and what it does to the next turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from samples import random_basis
from tiny import tiny_model

from traitbasis.chat import Turn
from traitbasis.errors import ReactionError, TraitSpecError
from traitbasis.reactive.affect import State
from traitbasis.reactive.reactor import CustomerState, Reactive, follow, mood, react
from traitbasis.reactive.scenarios import read_scenarios
from traitbasis.simulator import UserSimulator

SCENARIO = next(one for one in read_scenarios() if one.scene == "Defense")
COLD = Turn("agent", "That is not our problem. You should have read the policy. It is your own fault.")
WARM = Turn(
    "agent", "I am so sorry about this, I understand how frustrating it is. I have just refunded the full amount."
)
HELPFUL = [
    Turn("agent", text)
    for text in (
        WARM.text,
        "Thank you for your patience. I can see the parcel left our depot in Leeds this morning.",
        "I am sorry again for the worry. I have moved you to express delivery at no charge.",
        "That must have been a long wait. Your new delivery date is Friday, 5 June.",
        "I understand, and I have just sent the confirmation to your e-mail.",
        "It's done: the courier will call you one hour before.",
    )
]
SYSTEM = Turn("system", "You are a customer. Your order #W100 is late. You may say ###STOP### or ###UNSATISFIED###.")
HELLO = (SYSTEM, Turn("agent", "Hi! How can I help you today?"))
ASKS = Turn("agent", "Could you tell me your order number, please?")
TELLS = Turn("customer", "It is #W100, as I said. I have been waiting for two weeks and I am upset.")


def talk(*turns: Turn) -> tuple[Turn, ...]:
    """The agent's turns, each answered by the customer but the last."""
    spoken = [*HELLO, TELLS]
    for turn in turns:
        spoken += [turn, TELLS]
    return tuple(spoken[:-1])


def test_a_customer_that_is_treated_coldly_gets_angrier_and_one_that_is_helped_calms_down() -> None:
    how = Reactive.read({"scenario": SCENARIO.id})
    start = SCENARIO.anchors.start
    cold, warm = (follow(talk(*[turn] * 3), how).states for turn in (COLD, WARM))
    assert cold[0] == warm[0] == start
    assert cold[-1].a > start.a and cold[-1].t < start.t
    assert warm[-1].a < start.a and warm[-1].t > start.t


def test_a_state_that_goes_on_is_the_same_as_one_folded_anew() -> None:
    how = Reactive.read({"scenario": SCENARIO.id, "unsatisfied": True, "condition": "frustration"})
    turns = (COLD, WARM, ASKS, ASKS)
    state: CustomerState | None = None
    for n in range(len(turns) + 1):
        state = follow(talk(*turns[:n]) if n else (*HELLO, TELLS)[:2], how, state)
        state = CustomerState.from_record(json.loads(json.dumps(state.record)))
    assert state == follow(talk(*turns), how)
    assert state.turns == len(turns) and len(state.states) == len(turns) + 1


def test_the_state_of_another_conversation_is_not_used_but_what_tools_said_is_kept() -> None:
    how = Reactive.read({"scenario": SCENARIO.id})
    other = follow(talk(COLD, COLD), how, tool_results=["the train leaves at 7:20"])
    mine = follow(talk(WARM, WARM), how, other)
    assert mine.states == follow(talk(WARM, WARM), how).states
    assert mine.told == ("the train leaves at 7:20",)


def test_asking_the_same_again_ends_in_unsatisfied_and_never_on_the_first_turn() -> None:
    how = Reactive.read({"condition": "frustration.cold.high.skeptical", "unsatisfied": True})
    said = [react(talk(*[ASKS] * n) if n else HELLO, how).says for n in range(9)]
    assert said[0] is None and said[1] is None
    assert said[-1] == "###UNSATISFIED###"
    assert said == sorted(said, key=lambda text: text is not None), "once it has left, it stays away"
    helped = [react(talk(*HELPFUL[:n]), how).says for n in range(1, len(HELPFUL) + 1)]
    assert helped == [None] * len(HELPFUL)
    assert all(react(talk(*[ASKS] * n), Reactive.read({"condition": "frustration"})).says is None for n in range(1, 9))


def test_an_opening_line_is_said_as_it_stands_and_in_charm_the_agent_opens() -> None:
    assert react((), Reactive.read({"scenario": SCENARIO.id})).says == SCENARIO.opening_line
    charm = next(one for one in read_scenarios() if one.scene == "Charm")
    rude = (Turn("agent", "You again. It is your own fault that nobody talks to you."),)
    opened = react(rude, Reactive.read({"scenario": charm.id}))
    assert opened.says is None and opened.state.states[0] == charm.anchors.start
    assert len(opened.state.states) == 2 and opened.state.states[1].a > charm.anchors.start.a, "the opener counts"
    assert charm.simulated_user_profile.text in opened.instruction and opened.whole


def test_one_wording_of_a_condition_holds_through_an_episode() -> None:
    how = Reactive.read({"condition": "dread"})
    told = {react(talk(*[WARM] * n), how).instruction for n in range(1, 6)}
    assert len(told) == 1
    others = {react((replace(SYSTEM, text=f"Task {n}."), *HELLO[1:]), how).instruction for n in range(20)}
    assert len(others) > 3, "another task has another wording"


def test_moods_are_told_apart_in_words() -> None:
    found = {
        mood(State(a, t), scene)
        for a in range(10, 100, 20)
        for t in range(10, 100, 20)
        for scene in ("Repair", "Charm")
    }
    assert len(found) == 50 and mood(State(100, 100), "Charm") == mood(State(81, 95), "Charm")


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"condition": "fury"}, "condition: .*fury"),
        ({"conditon": "dread"}, "conditon.*known: condition, carry"),
        ({"scenario": "nowhere"}, "scenario: .*nowhere"),
        ({"support": "nowhere"}, "support: .*nowhere"),
        ({"coupling": 1.0}, "coupling needs a scenario"),
        ({"coupling": float("nan"), "scenario": SCENARIO.id}, "coupling"),
        ({"carry": "both"}, "no condition to carry"),
        ({"carry": "loud", "condition": "dread"}, "carry"),
        ("frustration", "reactive"),
    ],
)
def test_what_a_customer_cannot_be_is_refused_by_name(written: object, named: str) -> None:
    with pytest.raises(ReactionError, match=named):
        Reactive.read(written)


@pytest.mark.parametrize("record", [None, {}, [], {"turns": 1}, {**follow(HELLO, Reactive()).record, "states": [[1]]}])
def test_a_damaged_state_is_refused(record: object) -> None:
    with pytest.raises(ReactionError):
        CustomerState.from_record(record)


@pytest.fixture(scope="module")
def user() -> Iterator[UserSimulator]:
    lm = tiny_model("llama")
    with UserSimulator(lm, random_basis(lm, "impatience", "dread")) as simulator:
        yield simulator


MESSAGES = [{"role": "system", "content": "You are a customer."}, {"role": "user", "content": "Hi!"}]


def test_a_condition_is_carried_as_text_or_as_traits_or_both(user: UserSimulator) -> None:
    def made(carry: str) -> tuple[dict[str, float], int]:
        turn = user.prepare(MESSAGES, reactive=Reactive.read({"condition": "dread", "carry": carry}), force=True)
        return turn.intensities, len(turn.request.prompt_ids)

    plain = len(user.prepare(MESSAGES).request.prompt_ids)
    (text, told), (traits, silent), (both, also) = (made(carry) for carry in ("text", "traits", "both"))
    assert (text, traits, both) == ({}, {"dread": 1.0}, {"dread": 1.0})
    assert told == also > silent == plain
    with pytest.raises(TraitSpecError, match="sorrow"):
        user.prepare(MESSAGES, reactive=Reactive.read({"condition": "sorrow", "carry": "traits"}))


def test_a_rising_emotion_raises_the_dose_only_where_it_is_coupled(user: UserSimulator) -> None:
    angry = [{"role": "assistant", "content": SCENARIO.opening_line}, *[{"role": "user", "content": COLD.text}]]
    for gain, more in ((0.0, False), (1.0, True)):
        how = Reactive.read({"scenario": SCENARIO.id, "coupling": gain})
        turn = user.prepare(angry, "impatience-1.0", reactive=how, force=True)
        assert (turn.intensities["impatience"] > 1.0) is more
        assert turn.reaction and (turn.reaction.scale > 1) is more


def test_without_a_reaction_nothing_changes(user: UserSimulator) -> None:
    """Contract 2 and 9: the same request, the same prompt, the same seed."""
    with_none, with_empty = (
        user.prepare(MESSAGES, "impatience-0.5"),
        user.prepare(MESSAGES, "impatience-0.5", reactive=Reactive()),
    )
    assert with_none.request.prompt_ids == with_empty.request.prompt_ids
    assert with_none.request.seed == with_empty.request.seed and with_none.intensities == with_empty.intensities


def test_what_is_said_as_it_stands_costs_no_generation(user: UserSimulator) -> None:
    turn = user.reply([{"role": "user", "content": "Hello?"}], reactive=Reactive.read({"scenario": SCENARIO.id}))
    assert turn.text == SCENARIO.opening_line and turn.completion_tokens == 0 and turn.finish == "stop"
    pieces = list(
        user.stream([{"role": "user", "content": "Hello?"}], reactive=Reactive.read({"scenario": SCENARIO.id}))
    )
    assert "".join(pieces) == SCENARIO.opening_line
