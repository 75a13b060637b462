"""Harness runs: every cell once, whatever goes wrong; and the oracle, which fails where its user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harnesses.customers import STOP, stops_early, tells_all, tells_nothing
from harnesses.wire import ScriptedAgent, call, listening
from runs import header
from samples import random_basis
from serving import serving
from tiny import tiny_model
from traitbasis.server import create_app
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.basis import Basis
from traitbasis.errors import HarnessError
from traitbasis.harness import drivers
from traitbasis.harness.drivers.facts import facts_of, fold, forms_of
from traitbasis.harness.drivers.worker import Endpoint, messages_of
from traitbasis.harness.published import User, named
from traitbasis.harness.runs import RunFile, cells_of, pick_tasks, seed_of, tally
from traitbasis.harness.schedule import Worker, WorkerDied, command_of, play_all
from traitbasis.outcomes import UNSTEERED, Cell, read_run
from traitbasis.simulator import UserSimulator

CONDITIONS = (UNSTEERED, "impatience-medium")
TASKS = {"retail": tuple("0123"), "airline": ("0", "1")}

# A driver that speaks the protocol and plays nothing. What becomes of a task stands in the file PLAN, by its id; others
# are solved. Every cell that is begun is written down in the file SEEN.
FAKE = """
import json, os, sys, time
settings = json.loads(sys.stdin.readline())
plan = json.load(open(os.environ["PLAN"]))
say = lambda what: print(json.dumps(what), flush=True)
tasks = {domain: [str(i) for i in range(6)] for domain in settings["domains"]}
say({"ready": {"harness_version": "0.0", "python": "3", "litellm": "1", "tasks": tasks}})
for line in sys.stdin:
    cell = json.loads(line)["cell"]
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(json.dumps([os.getpid(), time.time(), cell]) + "\\n")
    what = plan.get(cell["task"], plan.get("*", "solved"))
    time.sleep(plan.get("seconds", 0.0))
    tokens = {"agent": {"prompt": 10, "completion": 2}, "user": {"prompt": 5, "completion": 1}}
    more = {"seconds": 0.1, "tokens": tokens}
    more |= {"cost": {"agent": 0.5, "user": 0.0}, "made_by": {"seed": cell["user"]["seed"]}}
    more["messages"] = [{"speaker": "customer", "text": "Hi."}, {"speaker": "agent", "text": "Bye.", "calls": []}]
    if what == "dies":
        sys.exit("out of memory")
    if what in ("busy", "gone"):
        say({"failed": {"side": "user", "fatal": what == "gone", "text": f"the user is {what}", **more}})
    else:
        reward = {"solved": 1.0, "failed": 0.0}[what]
        say({"episode": {"reward": reward, "ended": "user_stop", "error": None, "steps": 3, **more}})
"""


@dataclass
class Fake:
    """The fake driver, as an interpreter that ``--python`` takes."""

    folder: Path

    def __post_init__(self) -> None:
        driver = self.folder / "driver.py"
        driver.write_text(FAKE)
        self.python = self.folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{driver}"\n')
        self.python.chmod(0o755)
        self.seen = self.folder / "seen.jsonl"
        self.seen.touch()
        self.does()

    def does(self, **plan: Any) -> None:
        (self.folder / "plan.json").write_text(json.dumps({key.removeprefix("t"): what for key, what in plan.items()}))

    @property
    def environment(self) -> dict[str, str]:
        return {"PLAN": str(self.folder / "plan.json"), "SEEN": str(self.seen)}

    @property
    def begun(self) -> list[tuple[int, float, dict[str, Any]]]:
        return [tuple(json.loads(line)) for line in self.seen.read_text().splitlines()]

    def start(self) -> Worker:
        return Worker(command_of(self.python, "tau_trait"), {"domains": ["retail"]})


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


class ServedUser(ScriptedAgent):
    """A scripted user that says of itself what a TraitBasis server does. refuses: status by model id."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.refuses: dict[str, int] = {}

    def answer(self, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
        if path == "/traits":
            return 200, json.dumps({"traits": ["impatience", "skeptical"], "details": {}}).encode()
        if body is None:
            return 404, b"{}"
        model = json.loads(body)["model"]
        if status := self.refuses.get(model, self.refuses.get("*")):
            return status, json.dumps({"error": {"message": f"{model} is too much; 0.7 times it fits"}}).encode()
        status, reply = super().answer(path, headers, body)
        made_by = {"model": "tiny", "basis": "b1", "traits": {}, "dose": 0.0, "seed": self.asked[-1].get("seed")}
        return status, json.dumps(json.loads(reply) | {"traitbasis": made_by}).encode()


@pytest.fixture
def user() -> Iterator[ServedUser]:
    served = ServedUser(say=tells_all)
    with listening(served):
        yield served


def a_run(**more: Any) -> Any:
    return header(CONDITIONS, 2, **{"domains": tuple(TASKS), "tasks": TASKS, "seed": 0, **more})


def found(**more: Any) -> dict[str, Any]:
    return {"reward": 1.0, "success": True, "cost": {"agent": 0.5, "user": 0.0}, **more}


# --- cells ---


def test_a_run_that_is_stopped_anywhere_has_paired_what_it_has() -> None:
    cells = cells_of(a_run())
    assert len(cells) == len(set(cells)) == 2 * 6 * 2
    groups = [cells[i : i + 2] for i in range(0, len(cells), 2)]
    assert all([cell.condition for cell in group] == list(CONDITIONS) for group in groups)
    assert all(len({cell._replace(condition="") for cell in group}) == 1 for group in groups)
    assert [cell.trial for cell in cells] == [0] * 12 + [1] * 12


def test_seeds_pair_conditions_and_tell_everything_else_apart() -> None:
    seeds = {cell: seed_of(0, cell) for cell in cells_of(a_run())}
    assert len(set(seeds.values())) == len(seeds) / 2
    for one, two in pairwise(seeds):
        if one._replace(condition="") == two._replace(condition=""):
            assert seeds[one] == seeds[two]
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert not set(seeds.values()) & {seed_of(1, cell) for cell in seeds}


@pytest.mark.parametrize(
    ("wanted", "picked"),
    [
        ("", {"retail": ("0", "1", "2", "3"), "named": ("a-1", "b")}),
        ("0-1", {"retail": ("0", "1"), "named": ("a-1", "b")}),
        ("2-9,0", {"retail": ("2", "3", "0"), "named": ("a-1",)}),
        ("a-1,3", {"retail": ("3",), "named": ("a-1",)}),
        ("b", {"named": ("b",)}),
    ],
)
def test_tasks_are_picked_by_place_and_by_id(wanted: str, picked: dict[str, tuple[str, ...]]) -> None:
    assert pick_tasks({"retail": list("0123"), "named": ["a-1", "b"]}, wanted) == picked


@pytest.mark.parametrize("wanted", ["7", "0,x", "9-4"])
def test_a_task_that_nobody_has_is_named(wanted: str) -> None:
    with pytest.raises(HarnessError, match=wanted.split(",")[-1]):
        pick_tasks({"retail": list("0123")}, wanted)


# --- the file ---


def test_what_is_there_is_not_played_again_and_failures_are(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunFile(path, a_run()) as file:
        first, second, third, *rest = file.to_do()
        file.append(first, found())
        file.append(second, found(infrastructure=True, success=False, reward=0.0))
        file.append(third, found(success=False, reward=0.0, error="its call was no JSON"))
    with RunFile(path, a_run(command="another way to say it")) as file:
        assert file.to_do() == [second, *rest] and file.to_do(retry_errors=False) == rest
        file.append(second, found())
    run = read_run(path)
    assert [episode.cell for episode in run.episodes] == [first, second, third]
    assert [episode.success for episode in run.episodes] == [True, True, False]
    assert run.episodes[1].traits == {"impatience": "medium"}


def test_a_line_that_a_kill_cut_off_is_played_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunFile(path, a_run()) as file:
        first, second, *_ = file.to_do()
        file.append(first, found())
        whole = path.read_bytes()
        file.append(second, found(error="é" * 50))
    for cut in (len(whole) + 1, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:cut])
        with RunFile(path, a_run()) as file:
            assert path.read_bytes() == whole and file.to_do()[0] == second
            file.append(second, found(error="é" * 50))
    assert len(read_run(path).episodes) == 2


def test_another_run_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunFile(path, a_run()):
        assert path.read_text().startswith('{"format": "traitbasis.run/1", ')
    with RunFile(path, a_run(user={**a_run().user, "url": "http://elsewhere"}, price={"in": 1, "out": 2})):
        pass  # the same user, reached elsewhere
    for other in ({"seed": 1}, {"max_steps": 7}, {"user": {"basis": "another"}}, {"tasks": {"retail": ("0",)}}):
        with pytest.raises(HarnessError, match=next(iter(other))):
            RunFile(path, a_run(**other))
    with RunFile(path, a_run()), pytest.raises(HarnessError, match="another run is writing"):
        RunFile(path, a_run())
    path.write_text('{"format": "something else"}\n')
    with pytest.raises(HarnessError, match=r"run\.jsonl"):
        RunFile(path, a_run())


def test_what_is_no_run_is_refused_as_it_was(tmp_path: Path) -> None:
    """No byte of somebody else's file is taken away, whatever its last line looks like."""
    path = tmp_path / "run.jsonl"
    for content in (b"notes\nof mine", b"notes of mine", b'{"format": "else"}\n{"half": '):
        path.write_bytes(content)
        with pytest.raises(HarnessError, match=r"run\.jsonl"):
            RunFile(path, a_run())
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    "broken",
    [
        {"reward": float("nan")},
        {"reward": None},
        {"cost": {"agent": float("inf")}},
        {"tokens": {"agent": {"prompt": -1}}},
        {"messages": [{"speaker": "narrator", "text": "And then?"}]},
        {"messages": [{"speaker": "agent", "text": ["a", "list"]}]},
        {"reward_info": object()},
    ],
)
def test_what_is_no_episode_fails_its_cell_and_not_the_run(tmp_path: Path, broken: dict[str, Any]) -> None:
    with RunFile(tmp_path / "run.jsonl", a_run()) as file:
        first, second, *_ = file.to_do()
        kept = file.append(first, found(**broken))
        assert kept.infrastructure and not kept.success and "is no episode" in str(kept.error)
        file.append(second, found())
        assert file.to_do()[0] == first
    assert [episode.infrastructure for episode in read_run(tmp_path / "run.jsonl").episodes] == [True, False]


def test_half_a_surrogate_pair_does_not_end_a_run(tmp_path: Path) -> None:
    with RunFile(tmp_path / "run.jsonl", a_run()) as file:
        file.append(file.to_do()[0], found(messages=[{"speaker": "agent", "text": "Hi \ud83d"}], reward_info="\udc00"))
    (episode,) = read_run(tmp_path / "run.jsonl").episodes
    assert episode.success and episode.messages[0].text == "Hi ?" and episode.reward_info == "?"


def test_episodes_are_counted_by_condition_and_domain(tmp_path: Path) -> None:
    with RunFile(tmp_path / "run.jsonl", a_run()) as file:
        tokens = {"agent": {"prompt": 10, "completion": 2}}
        file.append(Cell("retail", "0", UNSTEERED, 0), found(tokens=tokens))
        file.append(Cell("retail", "1", UNSTEERED, 0), found(tokens=tokens, success=False))
        file.append(Cell("airline", "1", UNSTEERED, 0), found(success=False, infrastructure=True, cost={"agent": None}))
        counted = tally(file.header, file.episodes.values())
    here = counted[UNSTEERED, "retail"]
    assert (here.planned, here.done, here.solved, here.errors, here.cost) == (8, 2, 1, 0, 1.0)
    assert (here.agent.prompt, here.agent.completion) == (20, 4)
    total = counted["", ""]
    assert (total.planned, total.done, total.solved, total.errors, total.cost) == (24, 3, 1, 1, None)
    assert (total.known, total.silent, here.known, here.silent) == (1.0, 3, 1.0, 2), "nobody said the user's tokens"


# --- workers ---


def cells(count: int) -> list[tuple[Cell, dict[str, Any]]]:
    return [
        (Cell("retail", str(i), UNSTEERED, 0), {"domain": "retail", "task": str(i), "user": {"model": "u", "seed": i}})
        for i in range(count)
    ]


def test_workers_play_side_by_side_and_live_on(fake: Fake) -> None:
    fake.does(seconds=0.15)
    outcomes = dict(play_all(cells(6), fake.start, concurrency=3, first=fake.start()))
    assert len(outcomes) == 6 and all(outcome["success"] for outcome in outcomes.values())
    assert outcomes[Cell("retail", "4", UNSTEERED, 0)]["made_by"] == {"seed": 4}
    began: dict[int, list[float]] = {}
    for worker, at, _ in fake.begun:
        began.setdefault(worker, []).append(at)
    assert len(began) == 3 and sum(map(len, began.values())) == 6
    assert max(times[0] for times in began.values()) < min(times[-1] for times in began.values() if len(times) > 1)


def test_a_worker_that_dies_costs_its_cell_alone(fake: Fake) -> None:
    fake.does(t1="dies", t3="failed")
    outcomes = dict(play_all(cells(6), fake.start, concurrency=1))
    died, failed = outcomes.pop(cells(6)[1][0]), outcomes.pop(cells(6)[3][0])
    assert died["infrastructure"] and not died["success"] and "out of memory" in died["error"]
    assert "infrastructure" not in failed and not failed["success"] and failed["error"] is None
    assert all(outcome["success"] for outcome in outcomes.values()) and len({pid for pid, *_ in fake.begun}) == 2


def test_an_endpoint_that_is_gone_ends_the_run_and_fails_nobody(fake: Fake) -> None:
    fake.does(t2="gone")
    outcomes = []
    with pytest.raises(HarnessError, match=r"task 2 .* still to do: the user is gone"):
        for outcome in play_all(cells(6), fake.start, concurrency=1):
            outcomes.append(outcome)
    assert [cell.task for cell, _ in outcomes] == ["0", "1"]


@pytest.mark.parametrize("said", ["1", "[]", "{}", "null", "Loading ..."])
def test_an_interpreter_that_says_something_else_is_no_worker(tmp_path: Path, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{said}'\n")
    python.chmod(0o755)
    with pytest.raises(WorkerDied):
        Worker(command_of(python, "tau_trait"), {})


def test_totals_say_what_is_known_and_what_is_not(fake: Fake, user: ServedUser) -> None:
    """One worker that died does not hide what the others cost."""
    fake.does(t1="dies")
    ran = bench(*usual(fake, user, "--tasks", "0-2", "--no-baseline", "--concurrency", 1))
    assert (
        ran.exit_code == 1
        and "agent 20/4, user 10/2 (unknown of 1 episodes); $1.00 and what is unknown" in " ".join(ran.output.split())
    ), ran.output


def test_failures_in_a_row_end_the_run(fake: Fake) -> None:
    fake.does(**{"*": "busy", "t3": "solved"})
    outcomes = []
    with pytest.raises(HarnessError, match="after 5 failures in a row: the user is busy"):
        for outcome in play_all(cells(20), fake.start, concurrency=1):
            outcomes.append(outcome)
    assert [outcome.get("infrastructure", False) for _, outcome in outcomes] == [True] * 3 + [False] + [True] * 5


def test_a_harness_that_does_not_start_says_why(tmp_path: Path) -> None:
    def start() -> Worker:
        return Worker([sys.executable, "-c", "raise RuntimeError('no such harness')"], {})

    with pytest.raises(WorkerDied, match="no such harness"):
        start()
    with pytest.raises(HarnessError, match="no such harness"):
        list(play_all(cells(3), start, concurrency=2))


# What a harness may do: print, and never come back. `drivers.worker` needs nothing but the standard library.
SLOW = """
import os, sys, time
from drivers.worker import serve
class Slow:
    def ready(self):
        print("a greeting of the harness")
        os.system("echo and of its children")
        return {"pid": os.getpid()}
    def play(self, cell):
        time.sleep(60)
serve(lambda settings, agent, user: Slow())
"""


def test_a_worker_ends_in_the_middle_of_a_cell_when_its_parent_does() -> None:
    side = {"url": "", "retries": 0, "timeout": 1}
    folder = Path(drivers.__file__).parents[1]
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(folder)!r})\n{SLOW}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"agent": side, "user": side}) + "\n" + json.dumps({"cell": {}}) + "\n")
    process.stdin.flush()
    ready = json.loads(process.stdout.readline())["ready"]
    assert ready == {"python": sys.version.split()[0], "pid": process.pid}, "what is printed is no answer"
    time.sleep(0.1)
    process.stdin.close()
    assert process.wait(10) == 0 and process.stdout.read() == ""
    process.stdout.close()


# --- the command ---


def bench(*arguments: Any, name: str = "tau-trait") -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", name, *map(str, arguments)])


def usual(fake: Fake, user: ServedUser, *more: Any) -> list[Any]:
    out = fake.folder / "run.jsonl"
    arguments = [
        "--agent",
        "oracle",
        "--user-url",
        user.url,
        "--python",
        fake.python,
        "--out",
        out,
        "--domains",
        "retail",
    ]
    return [*arguments, "--traits", "impatience", "--concurrency", 2, *more]


def test_a_run_is_written_with_what_made_it(fake: Fake, user: ServedUser) -> None:
    fake.does(t1="failed", t2="busy")
    ran = bench(
        *usual(fake, user, "--tasks", "0-3", "--trials", 2, "--levels", "low,high", "--mixes", "impatience+skeptical")
    )
    assert ran.exit_code == 1 and "10 cells are still to do" in ran.output, ran.output
    run = read_run(fake.folder / "run.jsonl")
    names = [
        UNSTEERED,
        "impatience-low",
        "impatience-low+skeptical-low",
        "impatience-high",
        "impatience-high+skeptical-high",
    ]
    assert list(run.header.conditions) == names and run.header.conditions[UNSTEERED] == {}
    assert run.header.agent == {"kind": "oracle", "patience": 3} and run.header.tasks == {
        "retail": ("0", "1", "2", "3")
    }
    assert run.header.user["basis"] == "b1" and run.header.user["url"] == user.url
    assert Counter(e.task for e in run.episodes if e.success) == {"0": 10, "3": 10}
    assert Counter(e.task for e in run.episodes if e.infrastructure) == {"2": 10}
    assert all(e.messages[0].speaker == "customer" and e.turns == 1 for e in run.episodes)
    told = {(c["task"], c["user"]["model"]) for *_, c in fake.begun}
    assert ("0", "steered-user@") in told and ("0", "steered-user@impatience-high+skeptical-high") in told
    assert "20/30 (67%)" not in ran.output and "4/6 (67%)" in ran.output and "2 errors" in ran.output
    # Once more: only what an endpoint failed at.
    before = len(fake.begun)
    fake.does()
    ran = bench(
        *usual(fake, user, "--tasks", "0-3", "--trials", 2, "--levels", "low,high", "--mixes", "impatience+skeptical")
    )
    assert (
        ran.exit_code == 0 and {c["task"] for *_, c in fake.begun[before:]} == {"2"} and len(fake.begun) == before + 10
    )
    assert not any(e.infrastructure for e in read_run(fake.folder / "run.jsonl").episodes)


def test_what_the_user_refuses_is_said_before_anything_is_played(fake: Fake, user: ServedUser) -> None:
    user.refuses = {"steered-user@impatience-high": 400}
    ran = bench(*usual(fake, user, "--levels", "high"))
    assert isinstance(ran.exception, HarnessError), ran.output
    assert "impatience-high" in str(ran.exception) and "0.7 times it fits" in str(ran.exception)
    ran = bench(
        "--agent", "oracle", "--user-url", "http://127.0.0.1:9", "--python", fake.python, "--traits", "impatience"
    )
    assert "traitbasis serve" in str(ran.exception)
    assert not fake.begun and not (fake.folder / "run.jsonl").exists()


def test_a_user_that_stops_ends_the_run_with_a_message(fake: Fake, user: ServedUser) -> None:
    fake.does(t2="gone")
    ran = bench(*usual(fake, user, "--concurrency", 1))
    assert isinstance(ran.exception, HarnessError) and "the user is gone" in str(ran.exception)
    assert "4 episodes; 8 cells are still to do" in ran.output
    assert not any(episode.infrastructure for episode in read_run(fake.folder / "run.jsonl").episodes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--agent", "llm"], "--agent-model"),
        (["--domains", "retail,space"], "space"),
        (["--domains", ""], "retail, airline"),
        (["--levels", "extreme"], "extreme"),
        (["--levels", ""], "--levels"),
        (["--tasks", "99"], "99"),
        (["--user-model", "steered-user"], "{spec}"),
        (["--price-in", "1"], "--price-out"),
        (["--price-in", "inf", "--price-out", "1"], "finite"),
        (["--timeout", "inf"], "finite"),
        (["--python", "/nowhere/python"], "/nowhere/python"),
        (["--agent", "llm", "--agent-model", "m", "--agent-temperature", "warm"], "warm"),
        (["--no-baseline", "--traits", ""], "no condition"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(fake: Fake, user: ServedUser, arguments: list[str], words: str) -> None:
    ran = bench(*usual(fake, user), *arguments)
    assert ran.exit_code and words in f"{ran.output} {ran.exception}"


def test_an_interpreter_without_the_harness_is_told_what_to_install(fake: Fake, user: ServedUser) -> None:
    bare = fake.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    ran = bench(*usual(fake, user), "--python", bare)
    assert "pip install tau-trait==0.1.1" in str(ran.exception), ran.exception


def killed(fake: Fake, user: ServedUser, number: int, lines: int, *more: Any) -> tuple[int, str]:
    """Runs the command in a process of its own, and sends it a signal once the file has so many lines."""
    path = fake.folder / "run.jsonl"
    command = [sys.executable, "-m", "traitbasis.cli", "bench", "tau-trait", *map(str, usual(fake, user, *more))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_a_killed_run_goes_on_without_repeating_or_losing_a_cell(fake: Fake, user: ServedUser) -> None:
    fake.does(seconds=0.05)
    more = ("--trials", 3)
    path = fake.folder / "run.jsonl"
    for lines in (5, 14):
        status, _ = killed(fake, user, signal.SIGKILL, lines, *more)
        assert status == -signal.SIGKILL
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"kind": "episode", "domain": "ret')  # killed in the middle of a line
    fake.does()
    assert bench(*usual(fake, user, *more)).exit_code == 0
    assert path.read_bytes().startswith(kept)
    episodes = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    played = Counter((e["domain"], e["task"], e["condition"], e["trial"]) for e in episodes)
    assert set(played.values()) == {1} and set(played) == set(map(tuple, cells_of(read_run(path).header)))
    assert len(played) == 6 * 2 * 3
    _gone(fake)


def test_ctrl_c_ends_a_run_cleanly(fake: Fake, user: ServedUser) -> None:
    fake.does(seconds=0.2)
    status, said = killed(fake, user, signal.SIGINT, 3)
    assert status == 130 and "Traceback" not in said, said
    assert "the same command goes on" in said
    assert read_run(fake.folder / "run.jsonl").notes == ()
    _gone(fake)


def _gone(fake: Fake) -> None:
    """No worker is left."""
    deadline = time.monotonic() + 10
    for worker in {pid for pid, *_ in fake.begun}:
        while Path(f"/proc/{worker}").exists() and "driver.py" in Path(f"/proc/{worker}/cmdline").read_text():
            assert time.monotonic() < deadline, worker
            time.sleep(0.02)


# --- the user ---


def test_a_probe_says_who_the_user_is_and_asks_each_condition_once(user: ServedUser) -> None:
    asked = User(f"{user.url}/v1/", body={"force": True})
    told = asked.probe({UNSTEERED: {}, "skeptical-low": {"skeptical": "low"}})
    assert told["model"] == "tiny" and told["basis"] == "b1" and set(told["conditions"]) == {UNSTEERED, "skeptical-low"}
    assert [(body["model"], body["force"]) for body in user.asked] == [
        ("steered-user@", True),
        ("steered-user@skeptical-low", True),
    ]
    assert asked.traits() == ["impatience", "skeptical"]
    assert User(user.url, "prompted-{name}").model_id({}) == "prompted-neutral"
    assert User(user.url, "gpt-4o").model_id({}) == "gpt-4o"


def test_a_real_server_is_asked_and_refuses_in_its_own_words() -> None:
    lm = tiny_model()
    basis = random_basis(lm, "impatience", "skeptical")
    basis = Basis(tuple(replace(column, limit=2.5) for column in basis.columns), basis.matrix)  # medium is a dose of 2
    with UserSimulator(lm, basis, guards=()) as simulator, serving(create_app(simulator)) as url:
        asked = User(url)
        told = asked.probe(named([{}, {"impatience": "medium"}]))
        assert (told["model_fingerprint"], told["basis"]) == (lm.fingerprint, basis.fingerprint)
        assert told["conditions"][UNSTEERED]["dose"] == 0 and told["conditions"]["impatience-medium"]["dose"] == 2
        assert told["sampling"]["max_tokens"] == simulator.sampling.max_tokens and told["asked_for"] == asked.model
        assert json.loads(json.dumps(told)) == told and asked.probe(named([{}, {"impatience": "medium"}])) == told
        with pytest.raises(HarnessError, match="unknown trait 'impatiance'; known: impatience, skeptical"):
            asked.probe(named([{"impatiance": "low"}]))
        with pytest.raises(HarnessError, match=r"condition 'impatience-high' .* times"):
            asked.probe(named([{}, {"impatience": "high"}]))
        assert User(url, body={"force": True}).probe(named([{"impatience": "high"}]))["conditions"]


# --- facts ---


@pytest.mark.parametrize(
    ("value", "said", "told"),
    [
        ("#W2378156", "it is W 2378156", True),
        ("#W2378156", "order w-2378 156, please", True),
        ("#W2378156", "order W23781567", False),
        ("19122", "my zip code is 19122.", True),
        ("19122", "119122", False),
        ("JFK", "from jfk to Seattle", True),
        ("JFK", "from jfks", False),
        ("basic_economy", "Basic Economy", True),
        ("economy", "uneconomy", False),
        ("mia_li_3668", "I am Mia Li 3668", True),
        ("2024-05-20", "on May 20th", True),
        ("2024-05-20", "the 20th of May", True),
        ("2024-05-20", "5/20/2024", True),
        ("2024-05-20", "2024-05-20", True),
        ("2024-05-20", "May 2", False),
        ("2024-05-02", "May 20", False),
        ("2024-03-02", "March 20", False),
        (3, "three bags", True),
        (3, "3 bags", True),
        (3, "33 bags", False),
        (1234, "$1,234", True),
        (54.04, "54.04 dollars", True),
        ("mia.garcia2723@example.com", "Mia.Garcia2723@EXAMPLE.com", True),
        ("O'Connor", "o'connor", True),
    ],
)
def test_a_fact_is_heard_in_any_form(value: Any, said: str, told: bool) -> None:
    assert bool(facts_of("argument", value, said)) is told


@pytest.mark.parametrize("value", [True, None, 0, 1, "no", "yes", "CA", ""])
def test_what_cannot_be_told_from_chance_is_no_fact(value: Any) -> None:
    assert forms_of(value) == ()


def test_folding_keeps_letters_and_digits() -> None:
    assert fold("#W-100, é_ß 1,234") == "w 100 é ss 1234"
    assert fold("2024-13-45") and forms_of("2024-13-45") == ("2024 13 45",)


# --- tau-trait itself ---


class Failing(ScriptedAgent):
    """A scripted agent whose endpoint answers with a status once `good` requests were answered."""

    status, good = 200, 0

    def answer(self, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
        if self.status != 200 and len(self.asked) >= self.good:
            self.asked.append({})
            return self.status, b'{"error": {"message": "not like this"}}'
        return super().answer(path, headers, body)


@dataclass
class Played:
    """tau-trait's own driver, with a scripted user and a scripted agent; made once, as importing it takes seconds."""

    user: ServedUser
    agent: Failing
    workers: dict[str, Worker] = field(default_factory=dict)

    def start(self, kind: str) -> Worker:
        asking = {"retries": 1, "timeout": 30, "key_env": "NO_SUCH_VARIABLE"}
        agent = {"kind": kind, "patience": 3, "model": "m", "strategy": "tool-calling", "temperature": None}
        settings = {
            "domains": ["retail"],
            "split": "test",
            "max_steps": 30,
            "agent": {**agent, "url": f"{self.agent.url}/v1", "price": {"in": 1000.0, "out": 2000.0}, **asking},
            "user": {"url": f"{self.user.url}/v1", **asking},
        }
        return Worker(command_of(Path(sys.executable), "tau_trait"), settings)

    def play(self, task: int, kind: str = "oracle") -> dict[str, Any]:
        if kind not in self.workers:
            self.workers[kind] = self.start(kind)
        cell = {"domain": "retail", "task": str(task), "user": {"model": "steered-user@impatience-low", "seed": 7}}
        self.user.asked.clear()
        self.agent.asked.clear()
        return self.workers[kind].play(cell)


@pytest.fixture(scope="module")
def tau() -> Iterator[Played]:
    key = os.environ.pop("OPENAI_API_KEY", None)  # the package wants it at import; the driver gives it one
    user, agent = ServedUser(say=tells_all), Failing()
    with listening(user), listening(agent):
        played = Played(user, agent)
        yield played
        for worker in played.workers.values():
            worker.close()
    if key is not None:
        os.environ["OPENAI_API_KEY"] = key


@pytest.mark.parametrize("task", [0, 2, 10])
def test_the_oracle_solves_a_task_with_a_customer_who_tells_everything(tau: Played, task: int) -> None:
    tau.user.say = tells_all
    episode = tau.play(task)["episode"]
    assert episode["reward"] == 1.0 and episode["ended"] == "user_stop" and episode["error"] is None
    said = [message for message in episode["messages"] if message["speaker"] == "customer"]
    assert said[0]["text"] == "Hello, I need some help." and said[-1]["text"] == STOP
    assert episode["steps"] == sum(message["speaker"] == "agent" for message in episode["messages"])
    assert all(body["model"] == "steered-user@impatience-low" and body["seed"] == 7 for body in tau.user.asked)
    assert episode["made_by"]["basis"] == "b1" and episode["tokens"]["user"]["prompt"] == 10 * len(said)
    assert episode["cost"]["agent"] == 0.0 and not tau.agent.asked


def test_the_oracle_fails_with_a_customer_who_tells_nothing(tau: Played) -> None:
    """It asks as often as its patience goes, and hands over."""
    tau.user.say = tells_nothing
    episode = tau.play(0)["episode"]
    assert episode["reward"] == 0.0 and episode["ended"] == "agent"
    asked = [m["text"] for m in episode["messages"] if m["speaker"] == "agent" and "zip code" in m["text"]]
    assert len(asked) == len(set(asked)) == 3
    assert [c["name"] for m in episode["messages"] for c in m.get("calls", [])] == ["transfer_to_human_agents"]


def test_the_oracle_uses_no_fact_before_it_was_said(tau: Played) -> None:
    """Everything but the order number, which comes at the third question."""
    late = 3

    def withholds(body: dict[str, Any]) -> str:
        asked = [message["content"] for message in body["messages"] if message["role"] == "user"]
        if "order number" not in asked[-1]:
            return tells_all(body).replace("#W2378156", "it")
        return "W 2378 156" if sum("order number" in text for text in asked) == late else "What?"

    tau.user.say = withholds
    episode = tau.play(0)["episode"]
    assert episode["reward"] == 1.0
    messages = episode["messages"]
    told = next(i for i, message in enumerate(messages) if message["text"] == "W 2378 156")
    used = next(i for i, message in enumerate(messages) if "#W2378156" in json.dumps(message))
    assert told < used and sum("order number" in message["text"] for message in messages[:told]) == 3
    late = 4  # one question more than its patience
    assert tau.play(0)["episode"]["reward"] == 0.0


def test_a_customer_who_leaves_too_early_fails_the_oracle(tau: Played) -> None:
    tau.user.say = stops_early
    episode = tau.play(0)["episode"]
    assert episode["reward"] == 0.0 and episode["ended"] == "user_stop"


def test_an_agent_is_played_with_its_tools_tokens_and_price(tau: Played) -> None:
    tau.user.say = lambda body: "I am Yusuf Rossi in 19122."
    tau.agent.say = lambda body: (
        call("transfer_to_human_agents", summary="No idea.")
        if body["messages"][-1]["role"] == "tool"
        else call("find_user_id_by_name_zip", first_name="Yusuf", last_name="Rossi", zip="19122")
    )
    episode = tau.play(0, "llm")["episode"]
    assert [(m["speaker"], m["text"]) for m in episode["messages"]][:3] == [
        ("customer", "I am Yusuf Rossi in 19122."),
        ("agent", ""),
        ("tool", "yusuf_rossi_9620"),
    ]
    assert episode["messages"][1]["calls"][0]["arguments"]["zip"] == "19122"
    assert episode["reward"] == 0.0 and episode["ended"] == "agent" and episode["steps"] == 2
    assert episode["tokens"]["agent"] == {"prompt": 20, "completion": 10}
    assert episode["cost"] == {"agent": pytest.approx(20 * 0.001 + 10 * 0.002), "user": 0.0}
    assert all("temperature" not in body and body["tools"] for body in tau.agent.asked)


def test_a_call_that_is_no_json_is_the_agents_own_failure(tau: Played) -> None:
    tau.user.say = lambda body: "Hello."
    broken = call("get_order_details")
    broken["tool_calls"][0]["function"]["arguments"] = "{not json"
    tau.agent.say = lambda body: broken
    episode = tau.play(0, "llm")["episode"]
    assert episode["ended"] == "error" and "JSONDecodeError" in episode["error"] and episode["reward"] == 0.0
    assert [message["speaker"] for message in episode["messages"]] == ["customer"]


@pytest.mark.parametrize(
    ("status", "good", "fatal", "requests"),
    [
        (429, 0, False, 2),
        (503, 1, False, 3),
        (401, 0, True, 1),
        (404, 0, True, 1),
        (400, 0, True, 1),
        (400, 1, None, 2),
    ],
)
def test_an_agents_endpoint_that_fails_is_no_failure_of_the_agent(
    tau: Played, status: int, good: int, fatal: bool | None, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again where that may help. What is bad only later is so by what the agent has said, and its own result."""
    tau.user.say = tau.agent.say = lambda body: "Hello."
    monkeypatch.setattr(tau.agent, "status", status)
    monkeypatch.setattr(tau.agent, "good", good)
    answer = tau.play(0, "llm")
    assert len(tau.agent.asked) == requests
    if fatal is None:
        assert answer["episode"]["ended"] == "error" and "not like this" in answer["episode"]["error"]
    else:
        failed = answer["failed"]
        assert failed["side"] == "agent" and failed["fatal"] is fatal and str(status) in failed["text"]
        assert failed["tokens"]["agent"]["prompt"] == 10 * good


def test_a_busy_user_costs_its_cell_and_leaves_nothing_behind(tau: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    tau.user.say = tells_all
    monkeypatch.setitem(tau.user.refuses, "*", 503)
    failed = tau.play(0)["failed"]
    assert failed["side"] == "user" and not failed["fatal"] and "503" in failed["text"]
    monkeypatch.undo()
    assert tau.play(0)["episode"]["reward"] == 1.0


def test_an_endpoint_that_nobody_listens_at_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm says of a refused connection that it was an error 500 of the server."""

    def completion(**request: Any) -> Any:
        error = RuntimeError("Connection error.")
        error.status_code = 500  # type: ignore[attr-defined]
        raise error

    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace(completion=completion))
    with listening(user := ServedUser()):
        for url, fatal in (("http://127.0.0.1:9/v1", True), (f"{user.url}/v1", False)):
            endpoint = Endpoint("user", {"url": url, "key": None, "retries": 0, "timeout": 1})
            with pytest.raises(RuntimeError):
                endpoint(model="m", messages=[])
            assert endpoint.failure and endpoint.failure["fatal"] is fatal and url in endpoint.failure["text"]


# --- endpoints that are no good ---


SECRET = "sk-secret-0123456789"


def asked(
    monkeypatch: pytest.MonkeyPatch, reply: Any, side: str = "agent", said: str | None = "Hello.", **settings: Any
) -> tuple[Endpoint, Any]:
    """An endpoint that was asked the second time in an episode, and what came of it. reply: what litellm gives, or
    raises."""

    def completion(**request: Any) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace(completion=completion))
    endpoint = Endpoint(side, {"url": "http://me:word@127.0.0.1:9/v1", "key": SECRET, "retries": 0, **settings})
    endpoint.begin()
    endpoint.calls = 1
    try:
        return endpoint, endpoint(model="m", messages=[{"role": "user", "content": said}])
    except Exception as error:
        return endpoint, error


def replied(message: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(choices=[SimpleNamespace(message=message)], _hidden_params={}, usage=None, **more)


def refused(status: int, text: str = "no", **headers: str) -> Exception:
    error = RuntimeError(text)
    error.status_code, error.response = status, SimpleNamespace(headers=headers)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("side", ["agent", "user"])
@pytest.mark.parametrize(
    "reply",
    [
        SimpleNamespace(choices=[], _hidden_params={}, usage=None),
        SimpleNamespace(choices=[SimpleNamespace(message=None)], _hidden_params={}, usage=None),
        SimpleNamespace(choices=None),
        "a web page",
        {"detail": "ok"},
    ],
)
def test_a_reply_that_is_none_is_the_endpoints_failure(monkeypatch: pytest.MonkeyPatch, side: str, reply: Any) -> None:
    endpoint, error = asked(monkeypatch, reply, side, timeout=1)
    assert isinstance(error, Exception) and endpoint.failure
    assert endpoint.failure["side"] == side and "gave no reply to go on with" in endpoint.failure["text"]


def test_an_agent_that_says_nothing_has_failed_and_its_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's endpoint refuses an empty message; but not what an agent has said."""
    for said, whose in ((None, None), (" ", None), ("Hello.", "user")):
        endpoint, error = asked(monkeypatch, refused(400), "user", said, timeout=1)
        assert isinstance(error, RuntimeError) and (endpoint.failure or {}).get("side") == whose


@pytest.mark.parametrize("after", ["nan", "-1", "inf", "Wed, 21 Oct 2015 07:28:00 GMT", "0"])
def test_a_pause_that_an_endpoint_asks_for_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    waited = list[float]()
    monkeypatch.setattr("traitbasis.harness.drivers.worker.time.sleep", waited.append)
    endpoint, _ = asked(monkeypatch, refused(429, **{"retry-after": after}), retries=2, timeout=1)
    assert (endpoint.failure and "429" in endpoint.failure["text"]) or "nobody answers" in str(endpoint.failure)
    assert len(waited) == 2 and all(0 <= seconds <= 30 for seconds in waited)


@pytest.mark.parametrize("error", [refused(400, f"Illegal header value b'Bearer {SECRET}'"), ValueError(SECRET)])
def test_no_failure_tells_a_key_or_a_password(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    endpoint, _ = asked(monkeypatch, error, "user", timeout=1)
    text = (endpoint.failure or {})["text"]
    assert "127.0.0.1:9" in text and "…" in text and SECRET not in text and "word" not in text


def test_half_a_surrogate_pair_is_said_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    message = SimpleNamespace(content="Hi \ud83d", tool_calls=None)
    _, reply = asked(monkeypatch, replied(message, traitbasis={"seed": 1}), "user", timeout=1)
    assert reply.choices[0].message.content == "Hi ?"


def test_a_message_in_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "image_url"}, {"type": "text", "text": "lo."}, "?"]
    assert messages_of([{"role": "user", "content": parts}, {"role": "assistant", "content": 7}]) == [
        {"speaker": "customer", "text": "Hello."},
        {"speaker": "agent", "text": ""},
    ]
