"""Same request, same seed, same reply: alone, again, or among sixteen others (contract 9)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from samples import MILD_GUARDS, sample_set
from tiny import tiny_model

from traitbasis.basis import DEFAULT_DOSE, Basis, build_basis
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.extract import extract
from traitbasis.model import LanguageModel
from traitbasis.simulator import UserSimulator
from traitbasis.tries import UserTurn

TALK = [{"role": "system", "content": "You want a refund."}, {"role": "user", "content": "How can I help?"}]
LONGER = [*TALK, {"role": "assistant", "content": "Refund."}, {"role": "user", "content": "Which order do you mean?"}]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def basis(lm: LanguageModel) -> Basis:
    return build_basis(
        [extract(lm, sample_set(trait=trait)) for trait in ("impatience", "confusion")], layer={"confusion": 1}
    )


@pytest.fixture(scope="module")
def user(lm: LanguageModel, basis: Basis) -> Iterator[UserSimulator]:
    with UserSimulator(lm, basis, engine=TransformersEngine(lm, max_batch=5), guards=MILD_GUARDS) as simulator:
        yield simulator


def derived(user: UserSimulator, messages: Any = TALK, traits: Any = "impatience", **options: Any) -> int:
    return user.prepare(messages, traits, **options).seed


def test_without_a_seed_one_is_derived_from_all_that_makes_the_request(user: UserSimulator) -> None:
    seeds = [
        derived(user),
        derived(user, LONGER),
        derived(user, TALK[1:]),
        derived(user, [{**TALK[0], "role": "user"}, {**TALK[1], "role": "system"}]),
        derived(user, traits=None),
        derived(user, traits="confusion"),
        derived(user, traits="impatience-1.01"),
        derived(user, trial=1),
        derived(user, trial="a"),
        derived(user, positions="all"),
        derived(user, temperature=0.5),
        derived(user, top_p=0.9),
        derived(user, top_k=3),
        derived(user, max_tokens=5),
        derived(user, stop=("x",)),
    ]
    assert all(one != other for one, other in combinations(seeds, 2))
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_one_seed_for_a_whole_episode_does_not_draw_its_turns_alike(user: UserSimulator) -> None:
    """tau2-bench sends the same seed with every turn; without traits in it, conditions stay paired."""
    first, again, later, steered = (
        user.prepare(messages, traits, seed=300).request.seed
        for messages, traits in ((TALK, None), (TALK, None), (LONGER, None), (TALK, "impatience"))
    )
    assert first == again == steered != later


def test_a_reported_seed_repeats_the_reply(user: UserSimulator) -> None:
    derived = user.reply(TALK, "impatience", max_tokens=8, temperature=1.0)
    assert user.reply(TALK, "impatience", max_tokens=8, temperature=1.0, seed=derived.seed) == derived


def test_the_same_request_in_other_words_has_the_same_seed(user: UserSimulator) -> None:
    said = derived(user, traits={"impatience": "high", "confusion": 0.5})
    assert (
        said
        == derived(user, traits="confusion-low+impatience_x-1.5")
        == derived(user, traits={"impatience": 1.5, "confusion": 0.5})
    )
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": TALK[0]["content"]}]},
        {**TALK[1], "name": "agent"},
    ]
    assert derived(user, parts) == derived(user) == derived(user, temperature=0.7, trial=0)
    assert derived(user, logprobs=5) == derived(user)


def test_another_basis_or_model_has_another_seed(user: UserSimulator, lm: LanguageModel, basis: Basis) -> None:
    with UserSimulator(lm, build_basis([extract(lm, sample_set())])) as other:
        assert derived(other) != derived(user)
        with UserSimulator(lm, basis) as same:
            assert derived(same) == derived(user)


def test_the_derived_seed_is_the_same_in_another_process(user: UserSimulator) -> None:
    """No Python hash in it: the digest of the JSON is all there is. Fixed by hand from the documented inputs."""
    spoken = [["system", TALK[0]["content"]], ["agent", TALK[1]["content"]]]
    drawn = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 96, "stop": []}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}
    sampling = {**drawn, **penalties}
    what = [user.lm.fingerprint, user.basis.fingerprint, {"impatience": 1.0}, spoken, sampling, "generated", 0]
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()
    assert derived(user) == int.from_bytes(digest[:8], "big") >> 1


def test_the_same_request_gets_the_same_reply_and_another_seed_another(user: UserSimulator) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0}
    first = user.reply(TALK, "impatience", seed=7, **options)
    assert user.reply(TALK, "impatience", seed=7, **options) == first
    assert user.reply(TALK, "impatience", **options) == user.reply(TALK, "impatience", **options)
    texts = {user.reply(TALK, "impatience", trial=trial, **options).text for trial in range(6)}
    assert len(texts) == 6, "trials vary on purpose"
    assert "".join(user.stream(TALK, "impatience", seed=7, **options)) == first.text


def test_sixteen_threads_get_what_each_gets_alone(user: UserSimulator) -> None:
    """Contracts 3 and 9; fault 34: traits of +k, -k and none take turns."""
    traits = [{"impatience": 2.0}, {"impatience": -2.0}, None, {"confusion": 2.0, "impatience": 1.0}]
    jobs = [
        (LONGER if i % 3 else TALK, traits[i % 4], {"seed": i // 2, "max_tokens": 8 + i, "temperature": float(i % 2)})
        for i in range(16)
    ]

    def reply(job: Any) -> UserTurn:
        messages, spec, options = job
        return user.reply(messages, spec, **options)

    alone = [reply(job) for job in jobs]
    assert len({turn.text for turn in alone}) > 10
    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(reply, jobs)) == alone


def test_a_turn_says_what_made_it(user: UserSimulator) -> None:
    """Contract 11."""
    turn = user.reply(TALK, "impatience-high+confusion-0", seed=7, max_tokens=6)
    assert turn.intensities == {"impatience": 1.5} and turn.seed == 7 and turn.sampling.max_tokens == 6
    assert turn.dose == pytest.approx(1.5 * DEFAULT_DOSE, rel=1e-5)
    made = user.provenance
    assert (made["model"], made["basis"], made["as"], made["dtype"]) == (
        "tiny-llama",
        user.basis.fingerprint,
        "user",
        "float32",
    )
    assert made["engine"] == "TransformersEngine" and set(made["versions"]) == {"traitbasis", "transformers", "torch"}


def test_cancelling_a_real_turn_ends_it_and_leaves_the_engine_running(user: UserSimulator) -> None:
    told: list[Any] = []
    endless = replace(user.prepare(TALK, seed=1, max_tokens=1500).request, stop_ids=frozenset())
    ticket = user.submit(replace(user.prepare(TALK), request=endless), told.append)
    ticket.cancel()
    with ThreadPoolExecutor(1) as pool:  # batches run one after the other, so the first has ended by then
        assert pool.submit(user.reply, TALK, seed=2, max_tokens=3).result(timeout=20).completion_tokens <= 3
    turns = [item for item in told if isinstance(item, UserTurn)]
    assert [turn.finish for turn in turns] == ["cancelled"] and turns[0].completion_tokens < 1000
