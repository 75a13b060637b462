"""Conversations, prompts and steering requests of every kind (1.5 of the harness contract), on every kind of model.

Each endpoint twice: what keeps to the protocol is answered, and what does not is answered or refused, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bodies
from bodies import any_headers, any_paths, headers, paths
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from oracle import chat_said, check_chat, check_completion, check_error, check_promptfoo, check_steering, refused
from served import BURST, WORLDS, Asked, Reply, Wire

CHAT, COMPLETION = "/chat/completions", "/completions"
worlds = st.sampled_from(sorted(WORLDS))
SLOTTED = ("chatml", "hermes", "llama tag")  # padding, in micro-batches, changes the last bits of sums


def bursts(*each: SearchStrategy[Any]) -> SearchStrategy[list[Asked]]:
    """Requests that are sent together, of path, body and headers."""
    return st.lists(st.builds(Asked, *each), min_size=1, max_size=BURST)


def all_answered(wire: Wire, kind: str, asked: Sequence[Asked], check: Callable[[Reply, Any], None]) -> None:
    for one, reply in zip(asked, wire.burst(kind, asked), strict=True):
        assert not refused(reply), reply.text
        check(reply, one.body)


def answered_or_refused(wire: Wire, kind: str, asked: Sequence[Asked], check: Callable[[Reply, Any], None]) -> None:
    for one, reply in zip(asked, wire.burst(kind, asked), strict=True):
        if not refused(reply):
            check(reply, one.body)


@settings(max_examples=settings.default.max_examples * 2)
@given(world=worlds, asked=bursts(paths(CHAT), bodies.chats, headers))
def test_a_chat_that_keeps_to_the_protocol_is_answered(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    all_answered(wires[world], "valid chats", asked, check_chat)


@settings(max_examples=settings.default.max_examples // 2)
@given(world=st.sampled_from(SLOTTED), asked=bursts(paths(CHAT), bodies.chats, headers))
def test_a_chat_gets_the_same_reply_alone_and_in_a_crowd(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    """Contract 9, for every kind of request in one crowd."""
    wire = wires[world]
    crowd = wire.burst("crowded chats", asked)
    for one, reply in zip(asked, crowd, strict=True):
        (alone,) = wire.burst("lonely chats", [one])
        assert chat_said(alone, one.body) == chat_said(reply, one.body)


@settings(max_examples=settings.default.max_examples * 2)
@given(world=worlds, asked=bursts(any_paths(CHAT), bodies.any_chats, any_headers))
def test_any_chat_is_answered_or_refused(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    answered_or_refused(wires[world], "any chats", asked, check_chat)


@given(world=worlds, asked=bursts(paths(COMPLETION), bodies.completions, headers))
def test_a_prompt_that_keeps_to_the_protocol_is_gone_on_with(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    all_answered(wires[world], "valid completions", asked, check_completion)


@given(world=worlds, asked=bursts(any_paths(COMPLETION), bodies.any_completions, any_headers))
def test_any_prompt_is_gone_on_with_or_refused(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    answered_or_refused(wires[world], "any completions", asked, check_completion)


single, batch = st.sampled_from(("/steer_bare", "/steer_tau")), st.just("/steer_batch")


@given(world=worlds, asked=bursts(single, bodies.steered, headers), batches=bursts(batch, bodies.batches, headers))
def test_steering_that_keeps_to_the_protocol_is_answered(
    wires: Mapping[str, Wire], world: str, asked: Any, batches: Any
) -> None:
    all_answered(wires[world], "valid steering", [*asked, *batches], check_steering)


@given(
    world=worlds,
    asked=bursts(
        st.one_of(single, batch), st.one_of(bodies.any_steered, bodies.any_batches, bodies.batches), any_headers
    ),
)
def test_any_steering_is_answered_or_refused(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    answered_or_refused(wires[world], "any steering", asked, check_steering)


promptfoo = st.sampled_from(("/promptfoo", "/u/off/promptfoo", "/u/anna@impatience-low/promptfoo"))


@settings(max_examples=settings.default.max_examples // 2)
@given(world=worlds, asked=bursts(promptfoo, bodies.promptfoo, headers))
def test_promptfoo_is_answered(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    all_answered(wires[world], "valid promptfoo", asked, check_promptfoo)


@given(world=worlds, asked=bursts(promptfoo, bodies.any_promptfoo, any_headers))
def test_anything_of_promptfoo_is_answered_or_refused(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    answered_or_refused(wires[world], "any promptfoo", asked, check_promptfoo)


anywhere = st.sampled_from((f"/v1{CHAT}", f"/v1{COMPLETION}", f"/u/off/v1{CHAT}", "/steer_tau", "/steer_batch"))


@settings(max_examples=settings.default.max_examples // 2)
@given(world=worlds, asked=bursts(anywhere, bodies.raw, any_headers))
def test_bytes_that_are_hardly_json_are_answered_or_refused(wires: Mapping[str, Wire], world: str, asked: Any) -> None:
    answered_or_refused(wires[world], "bytes", asked, lambda reply, body: None)


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FLY")
PATHS = (
    "",
    "/v1",
    "/v1/models",
    "/v1/models/anna",
    "/u/off/v1/models",
    "/traits",
    "/health",
    "/ready",
    "/metrics",
    "/u",
)


@settings(max_examples=settings.default.max_examples // 2)
@given(world=worlds, method=st.sampled_from(METHODS), path=st.sampled_from(PATHS), more=bodies.path_tails)
def test_any_method_anywhere_is_answered_or_refused(
    wires: Mapping[str, Wire], world: str, method: str, path: str, more: str
) -> None:
    wire = wires[world]
    reply = wire.send("paths", method, f"{wire.url}{path}{more}", headers={"Connection": "close"})
    assert reply.status in {200, 307, 400, 404, 405}, reply.text
    if reply.status >= 400 and method != "HEAD":
        check_error(reply.json())
