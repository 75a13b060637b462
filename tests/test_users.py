"""Served users in a YAML file: what can be said, and what is told of a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_basis
from tiny import tiny_model
from traitbasis.server import create_app

from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import UsersError
from traitbasis.simulator import UserSimulator
from traitbasis.users import ServedUser, check_users, describe_persona, read_users

TRAITS = ("impatience", "skeptical")


def read(tmp_path: Path, text: str) -> list[ServedUser]:
    file = tmp_path / "users.yaml"
    file.write_text(text, encoding="utf-8")
    users = read_users(file)
    check_users(users, TRAITS, {"skepticism": "skeptical"})
    return users


def test_everything_can_be_said_of_a_user(tmp_path: Path) -> None:
    (anna, bob) = read(
        tmp_path,
        """
        users:
          - name: hurried-anna
            traits: {impatience: high, skepticism: 0.5}
            persona: {age: 34, way_of_writing: "short sentences"}
            sampling: {temperature: 0.8, stop: "\\n"}
            guards: {thought: false}
            stop_tokens: ["###STOP###"]
            context: refuse
            force: true
          - name: bob
        """,
    )
    assert anna.traits == {"impatience": "high", "skepticism": 0.5}
    assert anna.about == "About you: age 34; way of writing short sentences."
    assert anna.sampling == {"temperature": 0.8, "stop": ("\n",)}
    assert (anna.stop_tokens, anna.context, anna.guards) == (["###STOP###"], "refuse", {"thought": False})
    assert anna.force
    assert bob == ServedUser(name="bob") and bob.about == "" and bob.context == "truncate" and not bob.force


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["users:"]),
        ("users: []", ["users:"]),
        ("- name: a", ["users:"]),
        ("users: [{name: a}]\nmore: 1", ["users:"]),
        ("users: [", ["YAML"]),
        ("users: [a]", ["number 1"]),
        ("users: [{traits: x}]", ["number 1", "'name'"]),
        ("users: [{name: a/b}]", ["'a/b'", "'name'"]),
        ("users: [{name: ''}]", ["'name'"]),
        ("users: [{name: a@b}]", ["'a@b'"]),
        ("users: [{name: a}, {name: a}]", ["'a'", "two users"]),
        ("users: [{name: impatience}]", ["'impatience'", "trait spec"]),
        ("users: [{name: skepticism-2}]", ["'skepticism-2'", "trait spec"]),
        ("users: [{name: 'off'}]", ["'off'", "trait spec"]),
        ("users: [{name: a, traits: greed-high}]", ["'a'", "'traits'", "greed", "impatience"]),
        ("users: [{name: a, traits: {impatience: very}}]", ["'a'", "very"]),
        ("users: [{name: a, sampling: {heat: 1}}]", ["'a'", "'sampling'", "heat"]),
        ("users: [{name: a, sampling: {temperature: -1}}]", ["'a'", "'sampling'", "temperature", "-1"]),
        ("users: [{name: a, guards: {politeness: true}}]", ["'a'", "'guards'", "politeness", "empty"]),
        ("users: [{name: a, stop_tokens: ['']}]", ["'a'", "'stop_tokens'", "''"]),
        ("users: [{name: a, stop_tokens: ['the end']}]", ["'a'", "'stop_tokens'", "the end"]),
        ("users: [{name: a, context: drop}]", ["'a'", "'context'", "truncate"]),
        ("users: [{name: a, force: perhaps}]", ["'a'", "'force'", "boolean"]),
        ("users: [{name: a, nmae: b}]", ["'a'", "'nmae'", "known fields", "persona"]),
        ("users: [{name: a, persona: {x: .nan}}]", ["'a'", "'persona'", "'x'", "nan", "words"]),
        ("users: [{name: a, persona: {x: }}]", ["'a'", "'persona'", "'x'", "None", "leave it out"]),
        ("users: [{name: a, persona: {x: [[b]]}}]", ["'a'", "'persona'", "'x'", "words"]),
        ("users: [{name: a, persona: {x: {b: c}}}]", ["'a'", "'persona'", "'x'", "words"]),
        ("users: [{name: a, persona: {x: !!timestamp 2026-01-01}}]", ["'a'", "'persona'", "'x'", "words"]),
        ("users: [{name: a, persona: {1: x}}]", ["'a'", "'persona'", "1", "quotes"]),
        ("users: [{name: a, persona: [nurse]}]", ["'a'", "'persona'", "{age: 34"]),
        ('users:\n- {name: a, persona: {x: "\\ud800"}}', ["line 2", "\\ud800", "surrogate"]),
        ('users:\n- {name: a, persona: {"\\udc00": x}}', ["line 2", "surrogate"]),
        ('users:\n- {name: a, stop_tokens: ["\\ud800"]}', ["line 2", "surrogate"]),
        ("users: [{name: a, traits: true}]", ["'a'", "'traits'", "True", "impatience-high+"]),
        ("users: [{name: a, traits: 3}]", ["'a'", "'traits'", "3", "impatience-high+"]),
        ("users: [{name: a, traits: [impatience]}]", ["'a'", "'traits'", "{impatience: high"]),
        ("users: [{name: a, traits: {impatience: true}}]", ["'a'", "'traits'", "True", "{impatience: high"]),
        ("users: [{name: a, sampling: {logprobs: 3}}]", ["'a'", "'sampling'", "logprobs", "request"]),
        ("users: [{name: a, name: b}]", ["line 1", "'name'", "already"]),
        ("users:\n- name: a\n  persona: {x: 1,\n    x: 2}", ["line 4", "'x'", "in line 3"]),
        ("users: [{name: a}]\nusers: [{name: b}]", ["line 2", "'users'"]),
        ("users: [{name: a, stop_tokens: [###STOP###]}]", ["YAML", "quotes", "#"]),
        ("users:\n- name: a\n  stop_tokens: ###STOP###", ["'a'", "'stop_tokens'", "quotes", "#"]),
        ("users:\n- name: a\n  stop_tokens:\n  - ###STOP###", ["'a'", "'stop_tokens'", "quotes", "#"]),
        (f"users: {'[' * 3000}", ["YAML"]),
        (f"users: [{{name: a, persona: {{x: {'9' * 5000}}}}}]", ["YAML"]),
    ],
)
def test_a_mistake_is_named_with_its_user_and_field(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsersError) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "traits.str" not in str(caught.value)
    assert "users.yaml" in str(caught.value) or caught.traceback[-1].name == "check_users"


def test_words_stay_as_they_are_written(tmp_path: Path) -> None:
    persona = "{smoker: no, vegan: true, shift: 12:30, code: 0123, born: 1990-01-02, pets: [cat, 2, yes]}"
    text = f"users: [&a {{name: a, persona: {persona}, traits: off, guards: {{thought: no}}}}, {{<<: *a, name: b}}]"
    (user, other) = read(tmp_path, text)
    told = "smoker no; vegan yes; shift 12:30; code 0123; born 1990-01-02; pets cat, 2, yes"
    assert user.about == other.about == f"About you: {told}."
    assert (user.traits, user.guards) == ("off", {"thought": False})
    assert ServedUser.model_validate({"name": "a", "traits": False}).traits == "off"
    (user,) = read(tmp_path, "users: [{name: a, sampling: {top_k: 5, min_p: .5, temperature: 1.0e-1, top_p: 1.0}}]")
    assert user.sampling == {"top_k": 5, "min_p": 0.5, "temperature": 0.1, "top_p": 1.0}


def test_a_user_of_whom_no_turn_can_be_had_is_refused_when_the_server_is_put_together() -> None:
    lm = tiny_model()
    engine = TransformersEngine(lm, max_context=256)
    with UserSimulator(lm, random_basis(lm, *TRAITS), engine=engine) as simulator:
        for user, words in (
            ({"traits": {"impatience": 900}}, "impatience-900 adds"),
            ({"sampling": {"logit_bias": {lm.vocabulary: 1}}}, f"logit_bias has token {lm.vocabulary}"),
            ({"persona": {"x": "long " * 500}}, "the context is 256"),
            ({"persona": {"x": "long " * 500}, "context": "refuse"}, "the context is 256"),
        ):
            with pytest.raises(UsersError, match=f"'anna'.*{words}"):
                create_app(simulator, users=[ServedUser.model_validate({"name": "anna", **user})])
        fine = {"traits": "impatience-low", "sampling": {"logit_bias": {lm.vocabulary - 1: 1}}, "persona": {"x": "y"}}
        create_app(simulator, users=[ServedUser.model_validate({"name": "anna", **fine})])
        assert engine.stats().steps == 0, "nothing is generated for that"


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsersError, match=r"missing\.yaml"):
        read_users(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsersError, match=r"binary\.yaml"):
        read_users(tmp_path / "binary.yaml")


FIELDS = ["users", *ServedUser.model_fields]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(entry=ANYTHING)
def test_no_yaml_ends_in_anything_but_users_or_an_error(tmp_path_factory: Any, entry: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    for written in (entry, {"users": entry}, {"users": [entry]}):
        file.write_text(yaml.safe_dump(written), encoding="utf-8")
        try:
            users = read_users(file)
        except UsersError as error:
            assert "any.yaml" in str(error)
        else:
            assert users and all(user.name for user in users)


def test_a_persona_says_what_is_known_and_no_more() -> None:
    assert describe_persona({"age": 30, "job": "", "home_town": "Ghent"}) == "About you: age 30; home town Ghent."
    assert describe_persona({}) == describe_persona({"age": " "}) == ""
