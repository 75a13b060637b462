"""Dialogues with a real server on a tiny model, and with a scripted one where things must go wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from samples import MILD_GUARDS, random_basis, to_yaml
from scripted import ScriptedEngine
from serving import serving
from tiny import tiny_model
from traitbasis.server import create_app
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.basis import Basis
from traitbasis.chat import read_messages
from traitbasis.collect import (
    STOP,
    Agent,
    Condition,
    Customer,
    EndpointAgent,
    ScriptedAgent,
    collect,
    customer_prompt,
    open_dialogues,
    read_conditions,
)
from traitbasis.dialogue_tasks import DialogueTask, read_tasks, tasks_hash
from traitbasis.dialogues import Dialogue, read_dialogues
from traitbasis.engines.base import Sampling
from traitbasis.errors import EvaluationError
from traitbasis.guards import named_stop_tokens
from traitbasis.model import LanguageModel
from traitbasis.pairs import known_traits
from traitbasis.prompts import judge_prompt
from traitbasis.remote import RemoteModel
from traitbasis.simulator import UserSimulator
from traitbasis.users import ServedUser

NOBODY: Condition = {}
IMPATIENT: Condition = {"impatience": "medium"}
MIX: Condition = {"impatience": "low", "skeptical": "low"}
BOTH = [NOBODY, IMPATIENT]


def made_task(number: int) -> DialogueTask:
    return DialogueTask(
        id=f"task-{number}",
        domain="lamps",
        company="Lamp House",
        instruction=f"You are a customer of Lamp House. You bought lamp W{number}.",
        facts={"order number": f"W{number}"},
        agent=("Lamp House, hello?", "What is your order number?", f"Done: W{number} is sent.", "Anything else?"),
        resolved=2,
    )


TASKS = [made_task(number) for number in range(3)]


def gather(
    path: Path,
    url: str | RemoteModel,
    conditions: list[Condition],
    tasks: list[DialogueTask] = TASKS[:2],
    *,
    turns: int = 2,
    agent: Agent | None = None,
    trials: int = 1,
    concurrency: int = 4,
    progress: Callable[[int], None] = lambda turns: None,
    **customer: Any,
) -> list[Dialogue]:
    """Collect into `path`, in as few lines as the tests need."""
    remote = url if isinstance(url, RemoteModel) else RemoteModel(url, retries=1, timeout=30, what="the simulated user")
    asked = Customer(**{"method": "steered", "remote": remote, **customer})
    agent = agent or ScriptedAgent()
    with remote:
        file = open_dialogues(path, asked, TASKS, conditions, agent=agent, turns=turns)
        collect(file, asked, tasks, conditions, agent=agent, trials=trials, concurrency=concurrency, progress=progress)
    return file.dialogues


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def basis(lm: LanguageModel) -> Basis:
    """Two random traits: medium is within their limit, high beyond it."""
    made = random_basis(lm, "impatience", "skeptical")
    return Basis(tuple(replace(column, limit=2.5) for column in made.columns), made.matrix)


@pytest.fixture(scope="module")
def real(lm: LanguageModel, basis: Basis) -> Iterator[str]:
    persona = {"manner": "impatient"}
    users = [
        ServedUser(name="hurried", traits="impatience-medium"),
        ServedUser(name="prompted-neutral"),
        ServedUser(name="prompted-impatience-low.skeptical-low", persona=persona),
    ]
    with (
        UserSimulator(lm, basis, sampling=Sampling(max_tokens=10), guards=MILD_GUARDS) as simulator,
        serving(create_app(simulator, users=users)) as url,
    ):
        yield f"{url}/v1"


def header_of(path: Path) -> dict[str, Any]:
    (header,), _ = read_dialogues([path])
    return header


def by_key(dialogues: list[Dialogue]) -> dict[Any, dict[str, Any]]:
    found = {each.key: asdict(each) for each in dialogues}
    assert len(found) == len(dialogues), "no dialogue is there twice"
    return found


def test_a_dialogue_says_what_it_is_and_with_its_header_what_made_it(real: str, tmp_path: Path, basis: Basis) -> None:
    """Contract 11."""
    found = gather(tmp_path / "a.jsonl", real, [NOBODY, MIX], turns=3, seed=5)
    header = header_of(tmp_path / "a.jsonl")
    served = header["served"]
    assert (served["model"], served["basis"], served["as"]) == ("tiny-llama", basis.fingerprint, "user")
    assert served["model_fingerprint"] and served["versions"]["torch"] and served["sampling"]["max_tokens"] == 10
    assert (header["method"], header["model"], header["url"]) == ("steered", "steered-user@{spec}", real)
    assert header["agent"] == {"kind": "scripted"} and header["tasks_hash"] == tasks_hash(TASKS)
    assert (header["seed"], header["turns"], header["sampling"]) == (5, 3, {}) and header["versions"]["traitbasis"]
    mix = "impatience-low+skeptical-low"
    assert sorted(by_key(found)) == [(spec, f"task-{i}", 0, "generated") for spec in ("", mix) for i in range(2)]
    for each in found:
        task = TASKS[int(each.task[-1])]
        assert [turn.speaker for turn in each.turns] == ["agent", "customer"] * 3 and all(each.said)
        assert [turn.text for turn in each.turns[::2]] == list(task.agent[:3])
        assert each.resolved == 4 and each.turns[4].text.startswith("Done") and each.ended == "turns"
        assert (each.instruction, each.facts, each.stop_tokens) == (task.instruction, task.facts, (STOP,))
        assert each.model == (f"steered-user@{mix}" if each.traits else "steered-user@")
        for turn in each.turns[1::2]:
            assert turn.made_by["spec"] == ("impatience-0.5+skeptical-0.5" if each.traits else "")
            assert (turn.made_by["dose"] > 0) == bool(each.traits) and turn.made_by["tries"] == 1
            assert turn.made_by["usage"]["completion"] >= 1
            assert len(json.dumps(turn.made_by)) < 300, "60 dialogues of 12 turns are to stay below 1 MB"


def test_conditions_are_paired_by_seeds_that_differ_between_tasks_and_trials(real: str, tmp_path: Path) -> None:
    found = gather(tmp_path / "a.jsonl", real, BOTH, turns=1, trials=2)
    seeds = {(each.task, each.trial, *each.traits): each.turns[1].made_by["seed"] for each in found}
    assert len(set(seeds.values())) == 4 and all(0 <= seed < 2**31 for seed in seeds.values())
    assert all(seed == seeds[(*key[:2],)] for key, seed in seeds.items())
    other = gather(tmp_path / "b.jsonl", real, [NOBODY], turns=1, seed=1)
    assert not {each.turns[1].made_by["seed"] for each in other} & set(seeds.values())


def test_what_is_said_does_not_depend_on_what_runs_beside_it(real: str, tmp_path: Path) -> None:
    """Contract 9."""
    alone = gather(tmp_path / "a.jsonl", real, [*BOTH, MIX], TASKS, concurrency=1)
    beside = gather(tmp_path / "b.jsonl", real, [*BOTH, MIX], TASKS, concurrency=9)
    assert by_key(alone) == by_key(beside) and len(alone) == 9
    assert len({each.said for each in alone}) > 3


def test_a_neutral_customer_is_unsteered_even_where_the_served_user_has_traits(real: str, tmp_path: Path) -> None:
    own = gather(tmp_path / "a.jsonl", real, [NOBODY], turns=1, model="hurried")
    neutral = gather(tmp_path / "b.jsonl", real, [NOBODY], turns=1, model="hurried@{spec}")
    assert [each.turns[1].made_by["spec"] for each in own] == ["impatience-1"] * 2
    assert [each.turns[1].made_by["spec"] for each in neutral] == [""] * 2
    assert all(each.turns[1].made_by["dose"] == 0 for each in neutral)


def test_a_template_with_a_name_finds_the_users_of_a_file(real: str, tmp_path: Path) -> None:
    found = gather(tmp_path / "a.jsonl", real, [NOBODY, MIX], turns=1, method="prompted", model="prompted-{name}")
    assert {each.model for each in found} == {"prompted-neutral", "prompted-impatience-low.skeptical-low"}
    assert all(each.method == "prompted" and each.turns[1].made_by["dose"] == 0 for each in found)


@pytest.mark.parametrize("model", ["steered-user", "user-{traits}", ""])
def test_a_template_that_cannot_say_the_traits_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"does not say which traits .* write \{spec\} or \{name\}"):
        gather(tmp_path / "a.jsonl", "http://127.0.0.1:9/v1", BOTH, model=model)
    assert not list(tmp_path.iterdir())


def test_both_kinds_of_positions_stand_in_one_file(real: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    clean = gather(path, real, [IMPATIENT])
    both = gather(path, real, [IMPATIENT], positions="all")
    assert [each.positions for each in both] == ["generated"] * 2 + ["all"] * 2
    assert {each.said for each in clean}.isdisjoint(each.said for each in both[2:])


def test_a_condition_beyond_its_limit_ends_the_run_and_names_itself(real: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    high: Condition = {"impatience": "high"}
    with pytest.raises(
        EvaluationError, match=r"(?s)^impatience-high, task 'task-\d', trial 0: .*answered 400.*limit 2\.5"
    ):
        gather(path, real, [NOBODY, high])
    assert {} in [each.traits for each in read_dialogues([path])[1]], "what was whole is kept"
    forced = gather(tmp_path / "b.jsonl", real, [NOBODY, high], force=True)
    assert {turn.made_by["forced"] for each in forced if each.traits for turn in each.turns[1::2]} == {True}
    with pytest.raises(EvaluationError, match=r"unknown trait 'impatiance'; known: impatience, skeptical"):
        gather(tmp_path / "c.jsonl", real, [{"impatiance": "low"}])
    assert not (tmp_path / "c.jsonl").exists(), "nothing is begun"


def test_a_customer_who_says_stop_ends_the_dialogue_as_they_said_it(
    lm: LanguageModel, basis: Basis, tmp_path: Path
) -> None:
    engine = ScriptedEngine("Hi.", "Hi.", "W0", STOP)
    with UserSimulator(lm, basis, engine=engine) as simulator, serving(create_app(simulator)) as url:
        (only,) = gather(tmp_path / "a.jsonl", f"{url}/v1", [NOBODY], TASKS[:1], turns=4)
    assert only.said == ("Hi.", "W0", STOP) and only.ended == "stop" and len(only.turns) == 6


# --- what an endpoint is sent -----------------------------------------------------------------------------------------


class Script:
    """An endpoint that says what it is told to: `answer` gets a request's body. Keeps what it was asked.

    told: its ``traitbasis`` field. fail: statuses of the next answers. gate: requests wait for it.
    """

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.complete)
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.fail: list[int] = []
        self.fails: Callable[[dict[str, Any]], int] = lambda body: 200
        self.answer: Callable[[dict[str, Any]], str | None] = lambda body: f"I say {len(body['messages'])}"
        self.told: dict[str, Any] = {"model": "m", "model_fingerprint": "f", "basis": "b", "spec": "s", "tries": 1}
        self.more: dict[str, Any] = {}
        self.finish = "stop"
        self.pause = 0.0

    def complete(self, request: Request, body: dict[str, Any]) -> Response:
        with self.lock:
            self.requests.append(body)
            self.keys.add(request.headers["authorization"])
            status = self.fail.pop(0) if self.fail else self.fails(body)
        time.sleep(self.pause)
        if status != 200:
            return JSONResponse({"error": {"message": "not now"}}, status, headers={"retry-after-ms": "10"})
        message = {"role": "assistant", "content": self.answer(body)}
        choices = [{"index": 0, "message": message, "finish_reason": self.finish}]
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], **self.more}
        told = {"traitbasis": self.told} if self.told else {}
        return JSONResponse({**head, "choices": choices, "usage": usage, **told})


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Script, str]]:
    script = Script()
    with serving(script.app) as url:
        yield script, f"{url}/v1"


@pytest.fixture
def script(scripted: tuple[Script, str]) -> Script:
    scripted[0].reset()
    return scripted[0]


@pytest.fixture
def at(scripted: tuple[Script, str], script: Script) -> str:
    return scripted[1]


def asked_in(request: dict[str, Any]) -> str:
    """Which task a request is about."""
    return next(task.id for task in TASKS if f"lamp {task.facts['order number']}" in request["messages"][0]["content"])


def test_the_customer_is_the_assistant_and_hears_the_same_prompt_under_every_method(
    script: Script, at: str, tmp_path: Path
) -> None:
    """docs/harness-contract.md 1.1."""
    gather(tmp_path / "a.jsonl", at, [NOBODY], TASKS[:1])
    gather(tmp_path / "b.jsonl", at, [IMPATIENT], TASKS[:1], method="prompted", model="prompted-{name}")
    first, second = (script.requests[i : i + 3][-1] for i in (0, 3))
    assert (
        first["messages"]
        == second["messages"]
        == [
            {"role": "system", "content": customer_prompt(TASKS[0])},
            {"role": "user", "content": "Lamp House, hello?"},
            {"role": "assistant", "content": "I say 2"},
            {"role": "user", "content": "What is your order number?"},
        ]
    )
    assert (first["model"], second["model"]) == ("steered-user@", "prompted-impatience-medium")
    assert first.keys() == {"messages", "model", "seed"} and first["seed"] == second["seed"]


def test_the_prompt_is_read_as_a_customers_and_names_no_trait() -> None:
    for task in (*TASKS, *read_tasks()):
        prompt = customer_prompt(task)
        assert task.instruction in prompt and named_stop_tokens(prompt) == (STOP,)
        assert judge_prompt(read_messages([{"role": "system", "content": prompt}])) is None
    rules = customer_prompt(TASKS[0]).replace(TASKS[0].instruction, "").casefold()
    assert not [trait for trait in known_traits() if trait in rules.split()]


def test_options_are_sent_only_when_given(script: Script, at: str, tmp_path: Path) -> None:
    gather(tmp_path / "a.jsonl", at, [NOBODY], sampling={"temperature": 0.5}, positions="all", force=True)
    assert {**script.requests[-1], "messages": 0, "seed": 0, "model": 0} == {
        "messages": 0,
        "seed": 0,
        "model": 0,
        "temperature": 0.5,
        "positions": "all",
        "force": True,
    }
    header = header_of(tmp_path / "a.jsonl")
    assert header["sampling"] == {"temperature": 0.5} and header["force"] is True


def test_keys_are_sent_and_kept_nowhere(
    script: Script, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "private")
    with_password = at.replace("http://", "http://me:secret@")
    for number, url in enumerate((at, with_password)):
        path, agent = tmp_path / f"{number}.jsonl", EndpointAgent(RemoteModel(url, "secret"), "boss")
        gather(path, RemoteModel(url, "secret"), [NOBODY], agent=agent)
        assert "secret" not in path.read_text() and header_of(path)["url"] == header_of(path)["agent_url"] == at
    gather(tmp_path / "b.jsonl", at, [NOBODY])
    basic = f"Basic {b64encode(b'me:secret').decode()}"
    assert script.keys == {"Bearer secret", basic, "Bearer none"}, "the environment's key stays here"
    script.fails = lambda body: 400
    with pytest.raises(EvaluationError, match="answered 400") as caught:
        gather(tmp_path / "c.jsonl", RemoteModel(with_password, "secret"), [NOBODY])
    assert "secret" not in str(caught.value)


def test_a_turn_says_what_its_header_does_not(script: Script, at: str, tmp_path: Path) -> None:
    first = {"spec": "", "tries": 1, "rejected": {}, "failed_guard": None, "dropped": {}, "user": "u", "traits": {}}
    script.told = {**script.told, **first, "plain": None, "dtype": "float32"}
    (only,) = gather(tmp_path / "a.jsonl", at, [NOBODY], TASKS[:1], turns=1)
    assert header_of(tmp_path / "a.jsonl")["served"] == {
        "model": "m",
        "model_fingerprint": "f",
        "basis": "b",
        "dtype": "float32",
    }
    usage = {"prompt": 9, "completion": 3}
    seed = script.requests[-1]["seed"]
    made = {"seed": seed, "spec": "", "tries": 1, "rejected": {}, "failed_guard": None, "usage": usage}
    assert only.turns[1].made_by == made
    usual = script.told

    def differs(body: dict[str, Any]) -> str:
        other = {"dtype": "bfloat16", "dropped": {"agent": 1}, "tries": 2}
        script.told = {**usual, **other} if len(body["messages"]) == 4 else usual
        return "x"

    script.answer = differs
    (only,) = gather(tmp_path / "b.jsonl", at, [NOBODY], TASKS[:1])
    assert only.turns[1].made_by == made
    assert only.turns[3].made_by == {**made, "dtype": "bfloat16", "dropped": {"agent": 1}, "tries": 2}


def test_an_endpoint_that_says_nothing_of_itself_is_known_by_its_url(script: Script, at: str, tmp_path: Path) -> None:
    script.told, script.finish, script.more = {}, "length", {"system_fingerprint": "fp_1"}
    script.answer = lambda body: None
    (only,) = gather(tmp_path / "a.jsonl", at, [NOBODY], TASKS[:1], turns=1, model="someone")
    assert header_of(tmp_path / "a.jsonl")["served"] == {"url": at}
    assert only.said == ("",), "what an agent would be shown"
    made = {"finish": "length", "system_fingerprint": "fp_1", "usage": {"prompt": 9, "completion": 3}}
    assert only.turns[1].made_by == {"seed": script.requests[-1]["seed"], **made}


# --- how dialogues end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [STOP, f"Thanks, bye {STOP}", f"{STOP} wait"])
def test_a_stop_token_anywhere_ends_the_dialogue_and_stays_where_it_stood(
    text: str, script: Script, at: str, tmp_path: Path
) -> None:
    script.answer = lambda body: text if len(body["messages"]) == 4 else "no ###STOPP"
    told: list[int] = []
    (only,) = gather(tmp_path / "a.jsonl", at, [NOBODY], TASKS[:1], turns=4, progress=told.append)
    assert only.said == ("no ###STOPP", text) and only.ended == "stop"
    assert only.resolved == 4 == len(only.turns), "it ended before the agent was done"
    assert sum(told) == 4


def test_a_dialogue_ends_with_the_script_or_at_the_cap_of_turns(script: Script, at: str, tmp_path: Path) -> None:
    for turns, said in ((9, 4), (3, 3)):
        told: list[int] = []
        (only,) = gather(tmp_path / f"{turns}.jsonl", at, [NOBODY], TASKS[:1], turns=turns, progress=told.append)
        assert len(only.said) == said and len(only.turns) == 2 * said and only.ended == "turns" and sum(told) == turns


def test_a_model_can_play_the_agent_and_leaves_by_saying_nothing(script: Script, at: str, tmp_path: Path) -> None:
    words = iter(["<think>W0? I see</think> Which one?", "  "])
    script.answer = lambda body: next(words) if body["model"] == "boss" else "The lamp."
    agent = EndpointAgent(RemoteModel(at), "boss", {"temperature": 0.0})
    told: list[int] = []
    (only,) = gather(tmp_path / "a.jsonl", at, [NOBODY], TASKS[:1], turns=5, agent=agent, progress=told.append)
    assert [turn.text for turn in only.turns] == ["Lamp House, hello?", "The lamp.", "Which one?", "The lamp."]
    assert only.ended == "agent" and only.resolved is None and sum(told) == 5
    assert only.turns[0].made_by == {} and only.turns[2].made_by == {"usage": {"prompt": 9, "completion": 3}}
    first, second = (body for body in script.requests if body["model"] == "boss")
    assert first["temperature"] == 0 and first["seed"] == script.requests[0]["seed"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert "Lamp House" in first["messages"][0]["content"] and "lamps" in first["messages"][0]["content"]
    assert "W0" not in first["messages"][0]["content"], "an agent knows what it is told"
    header = header_of(tmp_path / "a.jsonl")
    assert (header["agent"]["kind"], header["agent"]["model"], header["agent_url"]) == ("endpoint", "boss", at)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_that_failed_goes_on_without_a_dialogue_lost_or_held_twice(
    script: Script, at: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    script.fails = lambda body: 400 if asked_in(body) == "task-1" and len(body["messages"]) == 4 else 200
    with pytest.raises(
        EvaluationError, match=r"^neutral, task 'task-1', trial 0: .*answered 400.*: .*not now"
    ) as caught:
        gather(path, at, BOTH, TASKS, concurrency=1)
    assert f"2 whole dialogues are in {path}; the same command goes on" in str(caught.value)
    kept = by_key(read_dialogues([path])[1])
    assert len(kept) == 2 and {key[1] for key in kept} == {"task-0"}
    assert len(script.requests) == 1 + 2 * 2 + 2, "the others were not begun, and what cannot help was not tried again"
    with path.open("ab") as file:
        file.write(b'{"method": "steered", "tra')  # as a kill leaves it
    script.fails = lambda body: 200
    before, told = len(script.requests), list[int]()
    whole = by_key(gather(path, at, BOTH, TASKS, progress=told.append))
    assert len(whole) == 6 and {key: whole[key] for key in kept} == kept and sum(told) == 6 * 2
    assert {asked_in(body) for body in script.requests[before + 1 :]} == {"task-1", "task-2"}
    assert whole == by_key(gather(tmp_path / "b.jsonl", at, BOTH, TASKS)) == by_key(read_dialogues([path])[1])
    before = len(script.requests)
    gather(path, at, BOTH, TASKS)
    assert len(script.requests) == before + 1, "all are there; the endpoint is only asked who it is"


def test_more_conditions_tasks_and_trials_can_be_added(script: Script, at: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for size, wanted in ((1, [NOBODY]), (2, BOTH), (3, [MIX])):
        gather(path, at, wanted, TASKS[:size], trials=size)
    assert len(by_key(read_dialogues([path])[1])) == 1 + (2 * 2 * 2 - 1) + 3 * 3


def test_a_failed_request_is_tried_again_and_then_ends_the_run(script: Script, at: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script.fail = [200, 503, 200, 500, 200]
    assert len(gather(path, at, [NOBODY], TASKS[:1])) == 1 and len(script.requests) == 5
    script.fails = lambda body: 503 if len(body["messages"]) == 4 else 200
    with pytest.raises(EvaluationError, match=r"(?s)task 'task-1'.*answered 503 .*1 whole dialogues are in .*goes on"):
        gather(path, at, [NOBODY], TASKS[:2])


def test_dialogues_that_run_when_another_fails_are_finished_and_kept(script: Script, at: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script.fails = lambda body: 400 if asked_in(body) == "task-1" and len(script.requests) > 1 else 200
    script.pause = 0.1
    with pytest.raises(EvaluationError, match="task 'task-1'"):
        gather(path, at, [NOBODY], TASKS, concurrency=3)
    assert {each.task for each in read_dialogues([path])[1]} == {"task-0", "task-2"}


def test_an_endpoint_that_goes_away_ends_the_run_with_what_to_do(script: Script, tmp_path: Path) -> None:
    path, remotes = tmp_path / "a.jsonl", list[RemoteModel]()
    with serving(script.app) as url:
        remotes.append(RemoteModel(f"{url}/v1", retries=0, what="the simulated user"))
        asked = Customer("steered", remotes[0])
        file = open_dialogues(path, asked, TASKS, [NOBODY], agent=ScriptedAgent(), turns=2)
        collect(file, asked, TASKS[:1], [NOBODY], agent=ScriptedAgent())
    with pytest.raises(
        EvaluationError, match=r"(?s)the simulated user at http://127.* cannot be reached.*1 whole dial"
    ):
        collect(file, asked, TASKS, [NOBODY], agent=ScriptedAgent())
    with pytest.raises(EvaluationError, match="cannot be reached"):
        gather(tmp_path / "b.jsonl", RemoteModel(f"{url}/v1", retries=0), [NOBODY])
    assert len(read_dialogues([path])[1]) == 1 and not (tmp_path / "b.jsonl").exists()


def test_other_settings_are_refused(script: Script, at: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    gather(path, at, [NOBODY])
    before = path.read_bytes()
    changes: list[tuple[str, dict[str, Any]]] = [
        ("turns", {"turns": 3}),
        ("seed", {"seed": 1}),
        ("sampling", {"sampling": {"temperature": 0.0}}),
        ("model", {"model": "hurried@{spec}"}),
        ("method", {"method": "prompted"}),
        ("agent", {"agent": EndpointAgent(RemoteModel(at), "boss")}),
    ]
    for name, change in changes:
        with pytest.raises(EvaluationError, match=rf"a\.jsonl holds dialogues .* other settings \({name}\)"):
            gather(path, at, [NOBODY], **change)
    script.told = {**script.told, "basis": "another"}
    with pytest.raises(EvaluationError, match=r"other settings \(served\)"):
        gather(path, at, [NOBODY])
    assert path.read_bytes() == before


def test_a_server_may_come_back_elsewhere_but_not_as_another(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for number in (1, 2):
        with serving(script.app) as url:
            assert len(gather(path, f"{url}/v1", [NOBODY], TASKS[:number])) == number

    def restarted(body: dict[str, Any]) -> str:
        script.told = {**script.told, "basis": "c" if len(body["messages"]) > 2 else "b"}
        return "x"

    script.answer = restarted
    with (
        serving(script.app) as url,
        pytest.raises(EvaluationError, match=r"now serves another basis \(c instead of b\)"),
    ):
        gather(path, f"{url}/v1", [NOBODY], TASKS)
    assert len(read_dialogues([path])[1]) == 2


def test_a_run_that_is_interrupted_keeps_what_is_whole_and_ends_soon(script: Script, at: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script.pause = 0.02
    asked = Customer("steered", RemoteModel(at))
    file = open_dialogues(path, asked, TASKS, [NOBODY], agent=ScriptedAgent(), turns=4)
    whole = file.append

    def append(dialogue: Dialogue) -> None:
        whole(dialogue)
        raise KeyboardInterrupt

    file.append = append  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        collect(file, asked, TASKS, [NOBODY], agent=ScriptedAgent(), trials=9, concurrency=2)
    assert len(read_dialogues([path])[1]) == 1 and len(script.requests) < 20, "of 109"


# --- conditions -------------------------------------------------------------------------------------------------------


def test_conditions_are_each_trait_and_mix_at_each_level() -> None:
    assert read_conditions(["a", "b"], ["low", "high"], ["a+b"], neutral=True) == [
        {},
        {"a": "low"},
        {"b": "low"},
        {"a": "low", "b": "low"},
        {"a": "high"},
        {"b": "high"},
        {"a": "high", "b": "high"},
    ]
    assert read_conditions([], ["medium"], ["b-low+a", "a + b-low"]) == [{"b": "low", "a": "medium"}]
    assert read_conditions([], [], [], neutral=True) == [{}]


@pytest.mark.parametrize("mix", ["a+", "a+a", "a-hihg", "a-0.5", "+", "-low", "a-nan"])
def test_what_is_no_condition_is_named(mix: str) -> None:
    with pytest.raises(EvaluationError, match="write each trait once, and as level one of low, medium, high"):
        read_conditions([], ["medium"], [mix])
    for nothing in ((["a"], []), ([], ["low"])):
        with pytest.raises(EvaluationError, match="no condition to collect; give --traits"):
            read_conditions(*nothing)


def test_nothing_to_collect_is_named(tmp_path: Path, script: Script, at: str) -> None:
    for change, says in (
        ({"turns": 0}, "turns is 0"),
        ({"trials": 0}, "trials is 0"),
        ({"concurrency": 0}, "concurrency is"),
    ):
        with pytest.raises(EvaluationError, match=says):
            gather(tmp_path / "a.jsonl", at, [NOBODY], **change)  # type: ignore[arg-type]
    with pytest.raises(EvaluationError, match="of tasks is 0"):
        gather(tmp_path / "a.jsonl", at, [NOBODY], [])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(to_yaml({"tasks": [task.model_dump(mode="json") for task in TASKS]}))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["eval", "collect", *map(str, arguments)])


def test_the_command_collects_and_goes_on(real: str, own_tasks: Path, tmp_path: Path) -> None:
    path = tmp_path / "dialogues" / "steered.jsonl"
    options = ["--url", real, "--tasks", own_tasks, "--turns", "2", "--limit-tasks", "2", "--neutral", "--out", path]
    result = run(
        *options, "--traits", "impatience", "--levels", "low,medium", "--mixes", "impatience-low+skeptical-low"
    )
    assert result.exit_code == 0, (result.output, result.exception)
    ((header,), found), line = read_dialogues([path]), result.output.replace("\n", "")
    assert len(found) == 2 * 4 and header["tasks_hash"] == tasks_hash(TASKS)
    tokens = sum(sum(turn.made_by["usage"].values()) for each in found for turn in each.turns[1::2])
    assert f"steered.jsonl: 8 dialogues (8 new), 32 turns, 16 of them the customer's, {tokens} tokens" in line
    again = run(*options)
    assert "8 dialogues (0 new)" in again.output and read_dialogues([path])[1] == found
    more = run(*options, "--positions", "all")
    assert "10 dialogues (2 new)" in more.output, (more.output, more.exception)


def test_the_command_is_killed_and_loses_nothing(script: Script, at: str, own_tasks: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    options = ["--url", at, "--tasks", own_tasks, "--turns", "2", "--neutral", "--trials", "4", "--out", path]
    script.pause = 0.05
    command = [sys.executable, "-m", "traitbasis.cli", "eval", "collect", *map(str, options), "--concurrency", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline, process.stdout and process.stdout.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    script.pause = 0.0
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") - 1 < 12
    result = run(*options)
    assert result.exit_code == 0 and "12 dialogues" in result.output
    assert path.read_bytes().startswith(kept) and len(by_key(read_dialogues([path])[1])) == 12


def test_the_commands_mistakes_are_named(
    at: str, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--neutral", "--agent-url", at).exit_code == 2
    for options, says in (
        (["--neutral", "--url", "localhost:80"], "the simulated user's URL is 'localhost:80'"),
        (["--neutral", "--tasks", "gone.yaml"], "cannot read tasks from gone.yaml"),
        ([], "no condition"),
        (["--neutral", "--url", f"{at}/nowhere"], "404 for model 'steered-user@'"),
    ):
        assert says in str(run(*options).exception)
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "pip install 'traitbasis[eval]'" in str(run("--neutral", "--url", at).exception)


def test_keys_come_from_the_environment(
    script: Script, at: str, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAITBASIS_USER_KEY", "one")
    monkeypatch.setenv("TRAITBASIS_AGENT_KEY", "two")
    path = tmp_path / "a.jsonl"
    options = ["--url", at, "--tasks", own_tasks, "--turns", "2", "--agent-url", at, "--agent-model", "boss"]
    result = run(*options, "--neutral", "--out", path)
    assert result.exit_code == 0 and script.keys == {"Bearer one", "Bearer two"}, (result.output, result.exception)
    assert "Bearer" not in path.read_text() and header_of(path)["agent"]["model"] == "boss"
