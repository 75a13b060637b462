"""Calibrated levels and the limit: a trait's own numbers, the share a request uses, what is served only when forced.

The basis here is made by hand of columns along the axes, so that shares can be worked out on paper.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from samples import random_basis, sample_vector
from scripted import ScriptedEngine
from tiny import WIDTH, tiny_model
from traitbasis.server import create_app

from traitbasis.basis import Basis, Column, build_basis
from traitbasis.errors import OverLimitError, RequestError, TraitSpecError, UsersError
from traitbasis.model import LanguageModel
from traitbasis.pairs import load_pairs, pair_set_hash
from traitbasis.simulator import MAX_DOSE, UserSimulator
from traitbasis.trait_vector import Provenance
from traitbasis.users import ServedUser

TALK = [{"role": "system", "content": "You are a customer."}, {"role": "user", "content": "Hi!"}]
NORMS = {"east": 10.0, "west": 30.0, "north": 20.0, "far": 5.0, "loose": 10.0, "stiff": 10.0}
LIMITS = {"east": 0.4, "west": 0.2, "north": 0.1, "far": 0.5, "loose": None, "stiff": 0.4}
# Medium is a dose of 0.2 for every trait. "far" is alone at another layer; "loose" was never calibrated.
PLACES = {"east": (2, 0, 1), "west": (2, 0, -1), "north": (2, 1, 1), "far": (3, 0, 1), "loose": (2, 2, 1)}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


def by_hand(provenance: Provenance, **more: Any) -> Basis:
    """Columns along the axes; a column's dose is its intensity times 0.2."""
    columns, directions = [], []
    for trait, (layer, axis, sign) in {**PLACES, "stiff": (2, 3, 1)}.items():
        direction = torch.zeros(WIDTH)
        direction[axis] = sign * 4.0
        own = {"limit": LIMITS[trait], "steerable": trait != "stiff", **more.get(trait, {})}
        scale = 0.2 * NORMS[trait] / 4.0
        columns.append(Column(trait, layer, scale, NORMS[trait], (f"{trait}ern",), provenance, **own))
        directions.append(direction)
    return Basis(tuple(columns), torch.stack(directions, dim=1))


@pytest.fixture(scope="module")
def basis(lm: LanguageModel) -> Basis:
    provenance = random_basis(lm, "impatience").columns[0].provenance
    return by_hand(provenance, east={"low": 0.25, "high": 2.0}, north={"low": 0.1, "high": 1.1})


@pytest.fixture(scope="module")
def user(lm: LanguageModel, basis: Basis) -> Iterator[UserSimulator]:
    with UserSimulator(lm, basis, engine=ScriptedEngine("Where is it?", threaded=False), guards=()) as user:
        yield user


# --- levels -----------------------------------------------------------------------------------------------------------


def test_a_level_is_its_traits_own_intensity(basis: Basis) -> None:
    assert basis.parse("east-low+west-low+north-low") == {"east": 0.25, "west": 0.5, "north": 0.1}
    assert basis.parse({"eastern": " High ", "west": "high", "north": "HIGH"}) == {
        "east": 2.0,
        "west": 1.5,
        "north": 1.1,
    }
    assert basis.parse("east+north-medium+far-off") == {"east": 1.0, "north": 1.0}
    assert basis.parse("east-0.5") == {"east": 0.5}, "numbers are nobody's level"
    assert basis.levels["east"] == {"low": 0.25, "medium": 1.0, "high": 2.0}
    assert basis.levels["far"] == {"low": 0.5, "medium": 1.0, "high": 1.5}


def test_levels_rise_and_stand_for_rising_doses(basis: Basis) -> None:
    for trait, levels in basis.levels.items():
        doses = [basis.dose({trait: intensity}) for intensity in levels.values()]
        assert list(levels) == ["low", "medium", "high"] and doses == sorted(set(doses))


# --- the share of the limit, worked out apart from the code -----------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "share"),
    [
        ({}, 0.0),
        ({"east": 1.0}, 0.2 / 0.4),
        ({"east": 2.0}, 1.0),
        ({"east": -2.0}, 1.0),  # by symmetry
        ({"west": 1.5}, 0.3 / 0.2),
        ({"loose": 40.0}, 0.0),
        # At right angles: doses 0.2 and 0.1 on norms of 10 and 20 are additions of 2 and 2; together |(2, 2)| over the
        # mean norm, 15. The limit: 0.3 of dose, of which 0.2 uses up 0.4 and 0.1 uses up 0.1.
        ({"east": 1.0, "north": 0.5}, math.hypot(2, 2) / 15 / (0.3 / (0.2 / 0.4 + 0.1 / 0.1))),
        # Against each other: additions of 6 (dose 0.6) and -3 (dose 0.1) leave 3 on a mean norm of 20.
        ({"east": 3.0, "west": 0.5}, 3 / 20 / (0.7 / (0.6 / 0.4 + 0.1 / 0.2))),
        # They cancel: additions of 6 and -6.
        ({"east": 3.0, "west": 1.0}, 0.0),
        # Two layers meet in one stream: the same way, in full; at right angles, as such; and what a later layer undoes
        # was there until then.
        ({"east": 1.0, "far": 1.0}, 0.2 / 0.4 + 0.2 / 0.5),
        ({"north": 0.1, "far": 1.0}, math.hypot(0.02 / 0.1, 0.2 / 0.5)),
        ({"east": 1.0, "far": -2.0}, 0.4 / 0.5),
        # A trait without a limit beside one that has it: additions of 4 and 2 at right angles, the norm 10 for both;
        # the calibrated 0.4 uses up all of its limit, the other 0.2 nothing.
        ({"east": 2.0, "loose": 1.0}, math.hypot(4, 2) / 10 / (0.6 / (0.4 / 0.4))),
    ],
)
def test_the_share_is_what_paper_says(basis: Basis, asked: dict[str, float], share: float) -> None:
    assert basis.load_share(asked) == pytest.approx(share, rel=1e-5, abs=1e-7)


def test_the_load_of_each_layer_is_told_lowest_first(basis: Basis) -> None:
    low, high = basis.loads({"far": 1.0, "west": 1.0})
    assert (low.layer, high.layer) == (2, 3)
    assert (low.dose, low.limit, low.share) == pytest.approx((0.2, 0.2, 1.0), rel=1e-5)
    assert (high.dose, high.limit, high.share) == pytest.approx((0.2, 0.5, 0.4), rel=1e-5)
    (free,) = basis.loads({"loose": 1.0})
    assert (free.limit, free.share) == (math.inf, 0.0)
    assert basis.loads({}) == basis.loads({"east": 0.0}) == ()


def test_a_trace_of_an_uncalibrated_trait_opens_no_door(basis: Basis) -> None:
    assert basis.load_share({"east": 4.0, "loose": 1e-6}) == pytest.approx(2.0, rel=1e-3)


REAL = [sample_vector(name, seed, layers=4, width=64) for seed, name in enumerate("abc")]


@given(st.dictionaries(st.sampled_from("abc"), st.floats(-4, 4).filter(lambda x: abs(x) > 1e-3), min_size=1))
def test_the_share_of_any_mixture_is_numpys_and_grows_with_it(asked: dict[str, float]) -> None:
    built = build_basis(REAL, layer={"b": 1})
    limits = {"a": 0.3, "b": 0.5, "c": 0.2}
    basis = Basis(tuple(replace(c, limit=limits[c.trait]) for c in built.columns), built.matrix)
    parts = [np.zeros(64)]
    for layer in (1, 2):
        columns = [(c, basis.matrix[:, i].double().numpy()) for i, c in enumerate(basis.columns)]
        there = [(c, asked[c.trait] * c.scale * v) for c, v in columns if c.layer == layer and c.trait in asked]
        if there:
            own = np.array([np.linalg.norm(push) / c.layer_norm for c, push in there])
            bound = np.array([limits[c.trait] for c, _ in there])
            norm = np.mean([c.layer_norm for c, _ in there])
            parts.append(sum(push for _, push in there) / norm * np.average(1 / bound, weights=own))
    share = max(np.linalg.norm(part) for part in [np.sum(parts, axis=0), *parts])
    assert basis.load_share(asked) == pytest.approx(share, rel=1e-4, abs=1e-6)
    twice = basis.load_share({trait: 2 * x for trait, x in asked.items()})
    assert twice == pytest.approx(2 * share, rel=1e-4, abs=1e-6), "it scales as the request does"


def test_a_share_is_known_only_where_every_trait_has_a_limit(basis: Basis) -> None:
    assert basis.known_share({}) == 0.0 and basis.known_share({"east": 1.0}) == pytest.approx(0.5, rel=1e-5)
    assert basis.known_share({"loose": 1.0}) is basis.known_share({"east": 1.0, "loose": 0.1}) is None


# --- refusing, and force ----------------------------------------------------------------------------------------------


def test_a_refusal_says_spec_doses_limits_share_factor_and_the_way_out(user: UserSimulator) -> None:
    with pytest.raises(OverLimitError) as caught:
        user.prepare(TALK, "far-1+west-1.5+loose-0")
    said = str(caught.value)
    for word in (
        "far-1+west-1.5",
        "0.3 at layer 2 (limit 0.2)",
        "0.2 at layer 3 (limit 0.5)",
        "1.5 times",
        "tiny-llama",
    ):
        assert word in said, said
    assert "0.666 at most" in said and "`force: true`" in said
    assert isinstance(caught.value, TraitSpecError)


@pytest.mark.parametrize(
    ("traits", "dose", "times"), [("east-2.01", "0.402", "1.005"), ("east-2.0001", "0.40002", "1.00005")]
)
def test_a_refusal_by_little_has_the_digits_that_show_it(
    user: UserSimulator, traits: str, dose: str, times: str
) -> None:
    with pytest.raises(OverLimitError, match=rf"{dose} at layer 2 \(limit 0\.4\): {times} times"):
        user.prepare(TALK, traits)


@pytest.mark.parametrize("traits", ["west-1.1", "west-1.333", "east-2+north-3", "west-7+far--2", "north-49"])
def test_the_factor_that_is_told_is_taken(user: UserSimulator, traits: str) -> None:
    with pytest.raises(OverLimitError) as caught:
        user.prepare(TALK, traits)
    (told,) = re.findall(r"by (\S+) at most", str(caught.value))
    asked = user.basis.parse(traits)
    assert user.prepare(TALK, {trait: x * float(told) for trait, x in asked.items()}).share == pytest.approx(
        1, abs=0.01
    )
    with pytest.raises(OverLimitError):
        user.prepare(TALK, {trait: x * float(told) * 1.02 for trait, x in asked.items()})


def test_a_level_that_stands_at_the_limit_is_served(user: UserSimulator) -> None:
    """High is calibrated as the strongest before the limit: rounding must not turn it away."""
    turn = user.prepare(TALK, "east-high")
    assert turn.share == pytest.approx(1.0, rel=1e-5) and not turn.forced


def test_traits_that_cancel_are_judged_by_what_is_left(user: UserSimulator) -> None:
    assert user.prepare(TALK, "east-6+west-2").share == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(OverLimitError):
        user.prepare(TALK, "east-6")


@pytest.mark.parametrize("traits", ["stiff-0.01", "east-low+stiff--1"])
def test_what_is_not_steerable_is_served_only_when_forced(user: UserSimulator, traits: str) -> None:
    with pytest.raises(OverLimitError, match=r"stiff.*not steerable on tiny-llama.*: stiff; leave it out.*force: true"):
        user.prepare(TALK, traits)
    assert user.prepare(TALK, traits, force=True).forced
    assert user.prepare(TALK, "stiff-0").intensities == {}


def test_force_changes_nothing_but_the_refusal(user: UserSimulator) -> None:
    """Contract 9: same request, forced or not, same reply; the derived seed does not know of it."""
    for prepare in (user.prepare, user.prepare_text):
        said: Any = TALK if prepare == user.prepare else "Hello"
        plain, forced = prepare(said, "east-high"), prepare(said, "east-high", force=True)
        assert asdict(plain.request) | {"additions": 0} == asdict(forced.request) | {"additions": 0}
        assert all(torch.equal(plain.request.additions[z], forced.request.additions[z]) for z in (2,))
        assert (plain.seed, plain.dose, plain.share, plain.forced) == (forced.seed, forced.dose, forced.share, False)
        assert not forced.forced, "it did not matter"
        with pytest.raises(OverLimitError):
            prepare(said, "west-2")
        beyond = prepare(said, "west-2", force=True)
        assert beyond.forced and beyond.share == pytest.approx(2.0, rel=1e-5) and beyond.dose == pytest.approx(0.4)
    assert user.reply(TALK, "west-2", force=True).forced
    assert user.reply(TALK, "east-high", force=True) == user.reply(TALK, "east-high")


def test_some_doses_cannot_be_forced(user: UserSimulator) -> None:
    with pytest.raises(TraitSpecError, match="at most 10") as caught:
        user.prepare(TALK, {"west": MAX_DOSE / 0.2 + 1}, force=True)
    assert not isinstance(caught.value, OverLimitError) and "force" not in str(caught.value)


@pytest.mark.parametrize("force", ["true", 1, 0, [], "yes"])
def test_force_is_true_or_false(user: UserSimulator, force: Any) -> None:
    with pytest.raises(RequestError, match=r"force is .*; it must be true or false"):
        user.prepare(TALK, force=force)


def test_what_is_not_steered_needs_no_force(user: UserSimulator) -> None:
    """Contract 10: requested JSON is the plain model's, whatever traits come with it."""
    turn = user.prepare(TALK, "west-5", response_format={"type": "json_object"})
    assert turn.plain and (turn.share, turn.forced) == (0.0, False)
    with pytest.raises(TraitSpecError, match="greed"):
        user.prepare(TALK, "greed-5", response_format={"type": "json_object"})


# --- over HTTP --------------------------------------------------------------------------------------------------------

USERS = (
    ServedUser(name="bold", traits="west-2", force=True),
    ServedUser(name="meek", traits="east-low"),
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def client(user: UserSimulator) -> TestClient:
    return TestClient(create_app(user, users=USERS))


def ask(client: TestClient, path: str = CHAT, headers: Any = None, **body: Any) -> httpx.Response:
    said: dict[str, Any] = {"prompt": "Hello"} if path.endswith(TEXT) else {"messages": TALK}
    entry = {"model": "steered-user", **said, **body}
    return client.post(path, json=[entry] if path == "/steer_batch" else entry, headers=headers)


def made(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json()["traitbasis"])


OVER = ["traits", "trait_dict", "trait", "extra_body", "header", "path", "model"]


def over(channel: str, path: str = CHAT) -> dict[str, Any]:
    """A request whose traits, through `channel`, are twice what is borne."""
    if channel == "header":
        return {"headers": {"X-Traits": "west-2"}, "path": path}
    if channel == "path":
        return {"path": f"/u/west-2{path}"}
    if channel == "model":
        return {"model": "steered-user@west-2", "path": path}
    return {channel: {"traits": "west-2"} if channel == "extra_body" else "west-2", "path": path}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("channel", OVER)
def test_what_is_beyond_the_limit_is_400_with_the_number_until_it_is_forced(
    client: TestClient, channel: str, path: str
) -> None:
    asked = over(channel, path)
    refused = ask(client, **asked)
    error = refused.json()["error"]
    assert refused.status_code == 400 and (error["param"], error["code"]) == ("traits", "over_limit")
    assert all(word in error["message"] for word in ("west-2", "0.4 at layer 2", "limit 0.2", "2 times", "0.5 at most"))
    assert ask(client, **asked, force=False).status_code == 400
    assert made(ask(client, **asked, force=True)).items() >= {"forced": True, "share_of_limit": 2.0}.items()


FORCES: list[dict[str, Any]] = [  # strongest first
    {"force": True},
    {"extra_body": {"force": True}},
    {"headers": {"X-TraitBasis-Force": "true"}},
    {"headers": {"X-TraitBasis-Force": " True "}},
    {"model": "bold"},
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/steer_tau", "/steer_bare", "/steer_batch", "/promptfoo"])
@pytest.mark.parametrize("force", FORCES[:4])
def test_every_endpoint_takes_force_from_body_and_header(client: TestClient, path: str, force: dict[str, Any]) -> None:
    said = {"history": TALK[1:]} if path == "/promptfoo" else {}
    assert ask(client, path, traits="west-2", **said).status_code == 400
    assert ask(client, path, traits="west-2", **said, **force).status_code == 200


def test_a_batch_says_400_of_a_dose_and_422_of_an_unknown_trait(client: TestClient) -> None:
    """The SDK takes 422 for a trait that is not in /traits, and would go on without one that is."""
    assert ask(client, "/steer_batch", trait_dict={"west": 2}).status_code == 400
    assert ask(client, "/steer_batch", trait_dict={"greed": 2}).status_code == 422


@pytest.mark.parametrize("stronger", range(5))
@pytest.mark.parametrize("weaker", range(5))
def test_the_stronger_channel_can_say_no(client: TestClient, stronger: int, weaker: int) -> None:
    if stronger >= weaker or {stronger, weaker} == {2, 3}:
        return
    no: list[dict[str, Any]] = [{"force": False}, {"extra_body": {"force": False}}]
    no += [{"headers": {"X-TraitBasis-Force": word}} for word in ("false", "FALSE")]
    assert ask(client, **{"traits": "west-2", **FORCES[weaker], **no[stronger]}).status_code == 400
    assert ask(client, **{"traits": "west-2", **FORCES[weaker]}).status_code == 200


def test_a_served_user_with_force_is_served_and_the_others_are_not(client: TestClient) -> None:
    assert made(ask(client, model="bold"))["forced"]
    assert made(ask(client, model="bold@east-low"))["forced"] is False
    assert made(ask(client, path="/u/bold/v1/chat/completions"))["forced"]
    assert ask(client, model="bold", force=False).status_code == 400
    assert ask(client, model="meek@west-2").status_code == 400
    assert ask(client, model="steered-user@west-2=force").status_code == 400, "a model's name cannot force"


def test_a_user_who_would_always_be_refused_is_told_of_at_the_start(user: UserSimulator) -> None:
    for traits in ("west-2", "stiff-low"):
        with pytest.raises(UsersError, match=rf"'anna': {traits.split('-')[0]}.*force: true"):
            create_app(user, users=[ServedUser(name="anna", traits=traits)])


@pytest.mark.parametrize("wrong", ["true", 1, 0, "yes", [True], {}])
def test_a_force_that_is_no_boolean_is_400(client: TestClient, wrong: Any) -> None:
    for body in ({"force": wrong}, {"extra_body": {"force": wrong}}):
        for path in (CHAT, TEXT, "/steer_bare", "/steer_batch"):
            response = ask(client, path, **body)
            assert response.status_code == 400 and "force is" in response.json()["error"]["message"]
    assert ask(client, force=wrong).json()["error"]["param"] == "force"
    assert ask(client, force=None, extra_body={"force": None}).status_code == 200


@pytest.mark.parametrize("wrong", ["yes", "1", "0", "force"])
def test_a_header_that_is_no_boolean_is_400_and_an_empty_one_says_nothing(client: TestClient, wrong: str) -> None:
    response = ask(client, headers={"X-TraitBasis-Force": wrong})
    assert response.status_code == 400 and "X-TraitBasis-Force" in response.json()["error"]["message"]
    assert made(ask(client, model="bold", headers={"X-TraitBasis-Force": ""}))["forced"]


def test_a_reply_tells_the_share_and_whether_force_mattered(client: TestClient) -> None:
    told = [
        ({"traits": "east"}, 0.5, False),
        ({"traits": "east-high", "force": True}, 1.0, False),
        ({"traits": "loose-20"}, None, False),
        ({"traits": "east+loose"}, None, False),
        ({"traits": "stiff", "force": True}, 0.5, True),
        ({"traits": {}}, 0.0, False),
    ]
    for path in (CHAT, TEXT):
        for asked, share, forced in told:
            found = made(ask(client, path, **asked))
            assert (found["share_of_limit"], found["forced"]) == (share, forced), asked
    streamed = ask(client, traits="west-2", force=True, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [c["traitbasis"]["share_of_limit"] for c in chunks if "traitbasis" in c] == [2.0]


def test_a_model_id_tells_its_share_and_no_example_is_one_that_would_be_refused(client: TestClient) -> None:
    one: Callable[[str], Any] = lambda name: client.get(f"/v1/models/{name}").json()["traitbasis"]  # noqa: E731
    assert (one("bold")["share_of_limit"], one("bold")["force"]) == (2.0, True)
    assert (one("meek")["share_of_limit"], one("meek")["force"]) == (0.125, False)
    assert one("steered-user@loose")["share_of_limit"] is None
    ids = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert "steered-user@east-medium" in ids and not any("stiff" in name for name in ids)


def test_traits_tells_levels_limits_and_what_cannot_be_steered(client: TestClient) -> None:
    found = client.get("/traits").json()
    assert found["traits"] == list(NORMS)
    assert found["details"]["east"] == {
        "layer": 2,
        "levels": {
            "low": {"intensity": 0.25, "dose": 0.05},
            "medium": {"intensity": 1.0, "dose": 0.2},
            "high": {"intensity": 2.0, "dose": 0.4},
        },
        "limit": 0.4,
        "steerable": True,
        "definition": None,
    }
    assert found["details"]["far"]["layer"] == 3 and found["details"]["loose"]["limit"] is None
    assert [trait for trait, detail in found["details"].items() if not detail["steerable"]] == ["stiff"]


def test_the_definition_is_that_of_the_pairs_a_column_was_made_from(lm: LanguageModel) -> None:
    pair_set = load_pairs("impatience")
    basis = random_basis(lm, "impatience", "skeptical")
    hashed = pair_set_hash(pair_set.pairs[:2])
    made_from = replace(
        basis.columns[0].provenance, pair_ids=tuple(p.id for p in pair_set.pairs[:2]), pair_set_hash=hashed
    )
    ours = Basis((replace(basis.columns[0], provenance=made_from), basis.columns[1]), basis.matrix)
    with UserSimulator(lm, ours, engine=ScriptedEngine("Hm.")) as simulator:
        details = TestClient(create_app(simulator)).get("/traits").json()["details"]
    assert details["impatience"]["definition"] == pair_set.definition
    assert details["skeptical"]["definition"] is None, "somebody's own pairs of that name may mean another thing"
